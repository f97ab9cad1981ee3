"""Who takes part: actor, critic and reference.

`handles.py` is the driver's side: methods that take a whole Batch and return columns or statistics.  `worker.py` is a
rank's side: the models.  Between them stands a Group; packing and the weights of a loss are made here, on the way.
"""
