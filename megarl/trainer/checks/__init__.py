"""What is looked at before a run starts: `check_only` with models and memory, and its rewards, also in a trial."""
