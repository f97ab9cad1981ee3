"""Measurements of a run: metrics and logs of each step, and profiles."""
