"""Resharding from one layout to another: which rank owns which slice, and which ranks send what to which."""
