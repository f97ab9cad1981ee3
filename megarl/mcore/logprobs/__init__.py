"""Columns of the model without logits: log-probs, entropy, exact KL and sums of squares from hidden states and head."""
