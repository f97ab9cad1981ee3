"""The servers of a run as the trainer sees them.

`server_manager`: which servers may generate. `pushes`: what pushes are told. `membership`: servers that join and leave.
`colocation`: takes turns with them on shared GPUs. `engine`: the engine of this machine. `abilities`: what a version
can do. `teacher_servers`: servers that teachers need.
"""
