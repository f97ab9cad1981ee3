"""The roles of a run: actor, critic, reference, teachers, and a reward model that scores on ranks.

`settings.py`: how a role is loaded, packed and trained.  `handles.py` is the driver's side: methods that take a whole
Batch and return columns or statistics; `frozen.py` has the roles that are not trained.  The rank's side is `worker.py`,
which runs the calls of `messages.py`, and `role.py`, which builds the models.  A Group connects them.  The handles also
pack sequences and compute the loss weights.
"""
