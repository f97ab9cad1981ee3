"""`megarl launch`: the file with which a run is submitted to a cluster, from its settings (`files/`, `machines.py`).

It knows what each door calls machines, GPUs, keys and queues, and that the numbers are those of the settings.  How a
process finds its place once it runs is known in commands/places.py.
Called by: people, and `megarl train --on ray` (`machines.py`).
"""
