"""Commands, each in a file or folder of its name, and which machine of a run this is (`this_machine`)."""
