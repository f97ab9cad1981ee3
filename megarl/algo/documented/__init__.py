"""Adapters for losses and estimators in the form of verl's documentation, on [batch, sequence] tensors."""
