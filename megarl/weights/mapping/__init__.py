"""One table of names for trainer and servers each, and the operations that the tables are made of."""
