"""The buckets of ages of tokens; the ages by hand are in tests/metrics/test_stats.py."""

import torch

from megarl.samples.token_age import BUCKETS, by_age


def test_every_age_is_in_one_bucket() -> None:
    ages = torch.arange(30, dtype=torch.int32)
    parts = by_age(ages, torch.ones(30, dtype=torch.bool))
    assert torch.stack(list(parts.values())).sum(0).tolist() == [1] * 30
    assert {name: ages[part].tolist() for name, part in parts.items() if name != "age_9_up"} == {
        "age_0": [0],
        "age_1": [1],
        "age_2": [2],
        "age_3_4": [3, 4],
        "age_5_8": [5, 6, 7, 8],
    }
    assert list(parts) == list(BUCKETS)


def test_masked_tokens_and_empty_buckets_are_left_out_and_all_without_an_older_token() -> None:
    parts = by_age(torch.tensor([8, 0, 1, 2]), torch.tensor([False, True, True, False]))
    assert {name: part.tolist() for name, part in parts.items()} == {
        "age_0": [False, True, False, False],
        "age_1": [False, False, True, False],
    }
    ages = torch.tensor([8, 0, 0])
    assert by_age(ages, torch.tensor([False, True, True])) == by_age(ages, torch.zeros(3, dtype=torch.bool)) == {}
