"""Collectors: processes that request completions and score them while the driver trains.

`collector_client`: the driver's side, for all collectors. `collector_share`: the servers of one
collector, and its process. `collector`: the program. `messages`: what the two sides say to each other.
"""
