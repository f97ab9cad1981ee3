"""Megatron's shards <-> tensors with Hugging Face names <-> what the servers hold.

It knows, for every parameter, its HF tensors and which slice of them a rank owns (`mapping/`, one table of trainer
and server each), and does three things with that: fill a model from a folder (`hf/load.py`), stream it or save it
(`hf/export.py`), and push it into the servers, verified (`push/`, with the plans of `reshard/` and the checks of
`verify/`). It does not know losses, optimizers, prompts, or what a server does with its weights. Roles and commands
call it on every rank; `push/receiver.py` alone runs inside the servers, and so it and what it imports need torch and
nothing else.
"""

from megarl.weights.mapping.families import FAMILIES, table_for

__all__ = ["FAMILIES", "table_for"]
