"""Checkpoints of a run: `checkpoint` saves and finds them, `resume` goes on from one."""
