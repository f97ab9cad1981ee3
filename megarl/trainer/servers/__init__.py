"""The servers of a run as the trainer sees them.

`server_manager`: which servers may generate. `pushes`: settings of pushes. `membership`: servers that join and leave.
`colocation`: takes turns with them on shared GPUs. `abilities`: what a version can do. `make_servers`: makes them, also
those of a reward model and of teachers, and chooses the engine of this machine.
"""
