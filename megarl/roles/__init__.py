"""The roles of a run: actor, critic and reference.

`handles.py` is the driver's side: methods that take a whole Batch and return columns or statistics.  `worker.py` is a
rank's side: the models.  A Group connects them.  The handles also pack sequences and compute the loss weights.
"""
