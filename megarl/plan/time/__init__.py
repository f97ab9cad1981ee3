"""Prediction of time: FLOPs, lengths, links and fitted constants, and the stages of a step."""
