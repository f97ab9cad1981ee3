"""`megarl plan`: predicts memory and time of a run without a GPU, and searches for better layouts."""
