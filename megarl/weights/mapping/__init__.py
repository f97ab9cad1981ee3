"""The tables that map names and slices of parameters to HF tensors, one for the trainer and one per kind of server."""
