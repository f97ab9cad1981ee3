"""What a layout comes to, before a GPU is taken: parameters and memory of every kind of rank.

`count.py` and `memory.py` are arithmetic on the numbers of a config.json; `report.py` prints what they say of a run.
`meta.py` asks Megatron itself, whose modules it builds without memory for their weights: the tests hold the two to the
same numbers.  The room starts no process and reads no weights.
"""
