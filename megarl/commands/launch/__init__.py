"""`megarl launch`: the file with which a run is submitted to a cluster, made of the templates in `files/`.

It knows what each cluster calls machines, GPUs, keys and queues.  What machines a run wants is known in
commands/machines.py, and how a process finds its place once it runs in commands/places.py.
Called by: the command line.
"""
