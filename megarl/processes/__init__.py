"""Processes of a run and what passes between them: ranks of one machine, their connections, and who ends with whom."""
