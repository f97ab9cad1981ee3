"""Log-probs, entropy, exact KL and sums of squares from hidden states and head, without storing all logits."""
