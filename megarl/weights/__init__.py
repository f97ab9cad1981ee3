"""Converts weights: Megatron's shards <-> tensors with Hugging Face names <-> the servers' parameters.

It knows, for every parameter, its HF tensors and which slice of them a rank owns (`mapping/`, one table for the trainer
and one for each kind of server). It does three things with that: load a model from a folder (`hf/load.py`), stream or
save it (`hf/export.py`), and push it to the servers and verify it (`push/`, with the plans of `reshard/` and the checks
of `verify/`). It does not know losses, optimizers, prompts, or what a server does with its weights. Roles and commands
call it on every rank. Only `push/receiver.py` runs inside the servers, so this file and its imports need nothing but
torch.
"""
