import torch

from megarl.weights.push.buckets import fill_buckets, plan_buckets

F32, BF16 = torch.float32, torch.bfloat16
SIZES = {"a": ((2,), F32), "b": ((3,), F32), "c": ((4,), BF16), "d": ((9,), BF16), "e": ((1,), BF16)}


def stream():
    for i, (name, (shape, dtype)) in enumerate(SIZES.items()):
        yield name, torch.full(shape, float(i), dtype=dtype)


def test_a_bucket_holds_one_type_up_to_a_limit() -> None:
    assert plan_buckets(SIZES, 1000) == [["a", "b"], ["c", "d", "e"]]
    assert plan_buckets(SIZES, 20) == [["a", "b"], ["c"], ["d", "e"]]
    assert plan_buckets(SIZES, 12) == [["a"], ["b"], ["c"], ["d"], ["e"]]  # d alone is larger than the limit


def test_buckets_hold_the_bytes_of_their_tensors_in_order() -> None:
    seen, last = {}, []
    for bucket in fill_buckets(stream(), SIZES, 20):
        last.append(bucket.is_last)
        for name, raw in bucket.parts():
            shape, dtype = SIZES[name]
            seen[name] = raw.clone().view(dtype).view(shape)
    assert last == [False, False, True]
    for name, tensor in stream():
        assert torch.equal(seen[name], tensor)


def test_buckets_share_one_buffer() -> None:
    addresses = {bucket.data.data_ptr() for bucket in fill_buckets(stream(), SIZES, 20)}
    assert len(addresses) == 1
