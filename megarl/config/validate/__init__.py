"""What cannot be, found before any process starts: values, combinations, layouts, servers, models, algorithms."""
