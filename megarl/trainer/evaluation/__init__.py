"""Scores of held-out prompts: by the run's servers, beside a step, and by transformers.

Called by: cli, train, artifacts.
"""
