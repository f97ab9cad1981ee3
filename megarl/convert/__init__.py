"""`megarl convert`: a model on disk from one form into another, bit for bit.

Two forms: a Hugging Face folder, and a folder of Megatron's sharded checkpoints (a run's own, or one made here).
`request.py` is the command line, `convert.py` what happens, `folders.py` what a folder holds and how one comes into
being, `ranks.py` the driver's view of the ranks, `worker.py` a rank.  Names of tensors are the business of `weights/`,
processes that of `group/`.
"""
