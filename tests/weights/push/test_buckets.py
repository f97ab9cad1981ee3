import torch

from megarl.weights.push.buckets import bucket_bytes_for, fill_buckets, plan_buckets

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


def test_two_buckets_in_turn_share_the_memory_of_two_buffers() -> None:
    made = []

    def new_buffer(num_bytes, device):
        made.append(num_bytes)
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)

    found = [bucket.data for bucket in fill_buckets(stream(), SIZES, 12, new_buffer=new_buffer)]
    assert [len(data) for data in found] == [8, 12, 8, 18, 2]
    assert made == [8, 18], "each as large as the largest bucket that it will hold"
    assert found[0].data_ptr() == found[2].data_ptr() == found[4].data_ptr() != found[1].data_ptr()
    assert found[1].data_ptr() == found[3].data_ptr()


def test_a_bucket_stays_as_it_is_while_the_next_one_is_filled() -> None:
    before = None
    for bucket in fill_buckets(stream(), SIZES, 12):
        if before is not None:
            assert torch.equal(*before)
        before = bucket.data, bucket.data.clone()


def test_the_size_of_buckets_follows_that_of_the_model() -> None:
    def size_of(numbers):
        return bucket_bytes_for({"w": ((numbers,), BF16)})

    assert [size_of(10**6), size_of(16 * 10**9), size_of(10**12)] == [2**26, 500 * 10**6, 2**31]
