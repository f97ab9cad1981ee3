"""Digests of tensors, comparisons with an exported folder, and the canary prompt."""
