"""What is looked at before a run starts: `check_only`, and a trial of its rewards.  Called by: cli, train, evaluate."""
