"""What users add: their code (`load`), what its decorators declare (`declared`), options of commands (`options`)."""
