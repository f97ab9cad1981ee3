"""Packed rows, the training step, optimizers, wrappers, and offload of a role's memory."""
