"""The roles of a run: actor, critic, reference, teachers, and a reward model that scores on ranks.

`handles.py` is the driver's side: methods that take a whole Batch and return columns or statistics; `reward_model.py`
has the one that takes sequences, `teacher.py` the one that gives hidden states.  The rank's side is `worker.py`, which
runs the calls, and `role.py`, which builds the models.  A Group connects them.  The handles also pack sequences and
compute the loss weights.
"""
