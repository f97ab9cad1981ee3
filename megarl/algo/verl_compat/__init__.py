"""The modules that a file written for verl imports, by their last names; `plugins/load.py` has the whole names."""
