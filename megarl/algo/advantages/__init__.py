"""Advantage estimators: their table, what they compute, and the way from a scored batch to advantages and returns."""
