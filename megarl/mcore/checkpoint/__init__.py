"""Sharded checkpoints: weights and optimizer state by Megatron's names, loadable under another layout."""
