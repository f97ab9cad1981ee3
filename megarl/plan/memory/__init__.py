"""Bytes: parameters of every kind of rank, what a role takes, and what stands on one GPU."""
