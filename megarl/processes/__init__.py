"""Processes of a run: how they start, end and are watched; `channels` are the connections between them."""
