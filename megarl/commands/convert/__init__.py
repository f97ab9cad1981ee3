"""`megarl convert`: converts a model on disk from one format to another, bit for bit.

Two formats: a Hugging Face folder, and a folder of shards by Megatron's names (of a run's checkpoint, or made here).
`request.py` is the command line, `convert.py` the driver, `folders.py` reads and creates folders; the ranks are those
of `roles/`.  `weights/` handles names of tensors, `group/` processes.
"""
