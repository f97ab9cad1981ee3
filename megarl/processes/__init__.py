"""Processes of a run and their connections: ranks of a machine, authenticated messages, relays, lifetimes."""
