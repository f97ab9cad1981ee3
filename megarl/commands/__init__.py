"""Commands that stand by themselves: megarl doctor, node, serve, and train -m; and which machine of a run this is."""
