"""Packed rows, the training step, optimizers, wrappers, and the offload of roles."""
