"""The control experiment in numbers: what shuffled rewards teach is nothing on average, up to a bound that follows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import mean, stdev

import pytest
import torch
from torch import Tensor

from megarl.algo.advantages.estimate import estimate
from megarl.batch import Batch
from megarl.train import shuffle_rewards

PROMPTS, N, LENGTH, WORDS = 64, 8, 3, 5
SHUFFLES = 400
SURE = 4.5  # standard errors: a mean of 0 is farther away in 7 of a million samples


def written() -> Batch:
    """Completions of a policy that chooses each word with the same probability; right are those that begin with 3."""
    tokens = torch.randint(WORDS, (PROMPTS * N, LENGTH), generator=torch.Generator().manual_seed(0))
    values = torch.full((PROMPTS * N * LENGTH,), 0.2)
    return Batch(
        tokens.flatten(),
        torch.full((PROMPTS * N,), LENGTH),
        {"response_mask": torch.ones(PROMPTS * N * LENGTH), "values": values},
        {"score": (tokens[:, 0] == 3).float(), "group": torch.arange(PROMPTS).repeat_interleave(N)},
    )


def gradient(batch: Batch, estimator: str) -> Tensor:
    """[LENGTH, WORDS] of sum A log p by the policy's logits, at the policy that wrote the batch."""
    columns = estimate(batch, adv_estimator=estimator)[0].columns
    chosen = torch.nn.functional.one_hot(batch.tokens, WORDS) - 1 / WORDS  # of log softmax
    return (columns["advantages"][:, None] * chosen).view(-1, LENGTH, WORDS).sum(0)


def taught(shuffle: Callable[[Batch, int], Batch], estimator: str) -> list[float]:
    """Of many shuffles, how much of the gradient of the right rewards is in theirs: 1 for the right ones."""
    batch = written()
    right = gradient(batch, estimator)
    return [
        float((gradient(shuffle(batch, seed), estimator) * right).sum() / right.square().sum())
        for seed in range(SHUFFLES)
    ]


def leaky(batch: Batch, seed: int, share: float) -> Batch:
    """A shuffle that leaves a share of the samples their own rewards."""
    kept = torch.rand(batch.num_sequences, generator=torch.Generator().manual_seed(seed)) < share
    shuffled = shuffle_rewards(batch, seed).per_sequence["score"]
    return batch.with_per_sequence(score=torch.where(kept, batch.per_sequence["score"], shuffled))


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "gae"])
def test_shuffled_rewards_teach_nothing_on_average(estimator: str) -> None:
    """In a random order each sample has the mean reward, so each advantage has the mean 0, and so has the gradient.

    (An advantage depends on the rewards of its group, or batch, in the same way for each sample, and they add up to 0.)
    Seeds are independent: the mean of their shares is within 4.5 of its standard errors, sd / sqrt(SHUFFLES).  One
    shuffle of B samples correlates with the right rewards by 1 / sqrt(B - 1) = 0.044, which bounds the error by 0.01.
    """
    shares = taught(shuffle_rewards, estimator)
    bound = SURE * stdev(shares) / SHUFFLES**0.5
    assert bound < 1.2 * SURE / (PROMPTS * N - 1) ** 0.5 / SHUFFLES**0.5
    assert abs(mean(shares)) < bound


def test_rewards_of_which_one_in_thirty_is_right_would_be_seen() -> None:
    shares = taught(partial(leaky, share=1 / 30), "grpo")
    assert mean(shares) > SURE * stdev(shares) / SHUFFLES**0.5
