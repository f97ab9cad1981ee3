"""`megarl convert`: converts a model on disk from one format to another, bit for bit.

Two formats: a Hugging Face folder, and a folder of shards by Megatron's names (of a run's checkpoint, or made here).
`request.py` is the command line, `convert.py` the driver, `folders.py` reads and creates folders, `ranks.py` is the
driver's view of the ranks, `worker.py` a rank.  `weights/` handles names of tensors, `group/` processes.
"""
