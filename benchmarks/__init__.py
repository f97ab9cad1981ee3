"""Measurements, a folder for each suite; README.md lists the commands."""
