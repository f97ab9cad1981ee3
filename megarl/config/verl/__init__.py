"""Words of verl's command lines as settings of ours: keys that have another name, place or form here, and defaults."""
