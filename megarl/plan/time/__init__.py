"""Seconds: FLOPs, lengths, links and fitted constants, and the stages of a step that are made of them."""
