"""`megarl plan` and `trainer.check_only`: what is asked, and what a person is shown."""
