"""Checks of a run's rewards and of its data for them before it starts, also in a trial on a few rows."""
