"""Megatron's settings of a model, computed from its config.json; Megatron itself is not imported.

It knows what each family's modelling code computes, and refuses what the trainer cannot.  It does not know layouts,
ranks, tensors of folders or training.  `mcore/models` builds models with these settings, and checks call them before.
"""
