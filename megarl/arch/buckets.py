"""The buckets in which a push sends a model's tensors: their size where the run does not set it."""

SMALLEST_PAIR, LARGEST_PAIR = 2**26, 2**31  # bytes of the two buckets of a push


def bucket_bytes_of(model_bytes: int) -> int:
    """Bytes of the two buckets of a push where rollout.bucket_bytes is null: some 128 buckets, up to 1 GiB each."""
    return max(SMALLEST_PAIR, min(LARGEST_PAIR, model_bytes // 64))
