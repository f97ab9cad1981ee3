"""Checkpoints of a run: `saver` writes them, `checkpoint` finds, checks and deletes them, `resume` begins at one."""
