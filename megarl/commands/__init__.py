"""The commands megarl node, serve and train -m, and which machine of a run this is (`this_machine`)."""
