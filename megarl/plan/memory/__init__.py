"""Prediction of memory: parameters of every kind of rank, memory of a role, and total memory of a GPU."""
