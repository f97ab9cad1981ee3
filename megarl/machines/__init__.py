"""The machines of a run: `nodes` is the driver's side, `agent` the side of every machine except the first.

An agent starts ranks (`processes.ranks`, with a relay between them and the driver) and servers on the driver's request.
The package handles machines, requests and failures, but no models.
"""
