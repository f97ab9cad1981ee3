"""Checkpoints of a run.

`saver` writes them, `manifest` says what must be in their files, `retention` which are kept; `checkpoint` finds and
restores them, `resume` goes on from one.
"""
