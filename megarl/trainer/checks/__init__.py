"""What is looked at before a run starts: `check_only` with models and memory, and a trial of its rewards.

Called by: cli, train, sft, evaluate.
"""
