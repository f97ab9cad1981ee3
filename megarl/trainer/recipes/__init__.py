"""What `trainer.prepare` of a recipe runs first: data, tiny models, and their supervised training (`cold_start`)."""
