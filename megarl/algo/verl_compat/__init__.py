"""Losses and estimators that are written as verl's documentation prints them, on [batch, sequence] tensors."""
