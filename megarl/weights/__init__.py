"""Megatron's shards <-> tensors with Hugging Face names <-> what the servers hold.

It knows, for every parameter, its HF tensors and which slice of them a rank owns (`tables.FAMILIES`, one table a
family; `names`, the mappings it is made of), and does three things with that: fill a model from a folder
(`load.load_hf`), stream it or save it (`export.hf_tensors`, `export.save_hf`), and push it into the servers, verified
(`push.Pusher`).  It does not know losses, optimizers, prompts, or what a server does with its weights.  Roles and
commands call it on every rank.
"""

from megarl.weights.tables import FAMILIES, table_for

__all__ = ["FAMILIES", "table_for"]
