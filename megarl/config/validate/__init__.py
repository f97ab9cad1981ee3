"""Checks before any process starts: values, combinations, layouts, servers, models, algorithms."""
