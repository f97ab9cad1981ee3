"""`megarl plan` and `trainer.check_only`: command-line options and output."""
