"""Megatron's shards <-> tensors with Hugging Face names <-> what the servers hold.

It knows, for every parameter, its HF tensors and which slice of them a rank owns (`tables.FAMILIES` and
`server_tables`, one table of trainer and server each; `names`, the mappings they are made of), and does three things
with that: fill a model from a folder (`load.load_hf`), stream it or save it (`export.hf_tensors`, `export.save_hf`),
and push it into the servers, verified (`push.Pusher`).  It does not know losses, optimizers, prompts, or what a server
does with its weights.  Roles and commands call it on every rank; `receiver` alone runs inside the servers, and so it
and what it imports need torch and nothing else.
"""

from megarl.weights.tables import FAMILIES, table_for

__all__ = ["FAMILIES", "table_for"]
