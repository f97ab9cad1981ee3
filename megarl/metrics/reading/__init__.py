"""Reads the files of a run's folder, also while they grow; torch is not imported here."""
