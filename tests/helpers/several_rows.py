"""Samples of several rows: trees of turns whose rows share context, and a slow account of what is learnt in them."""

import random
from collections.abc import Sequence

from megarl.samples.sample import Prompt, Row, Sample, TurnSpan, VersionSpan


def random_sample(rng: random.Random, prompt: Prompt, *, rewards: bool = False, vocab_size: int = 50) -> Sample:
    """A sample of up to 3 rows and 5 turns; a row may go on from any answer of the rows before it.

    Such an answer is learnt in its own row and is context in the other.
    """
    owners = [rng.randrange(3) for _ in range(rng.randint(1, 5))]
    members = [[turn for turn, owner in enumerate(owners) if owner == row] for row in dict.fromkeys(owners)]
    rows: list[Row] = []
    for turns in members:
        tokens = list(prompt.token_ids) or ids(rng, 1, vocab_size)  # nothing predicts a row's first token
        if rows and rng.random() < 0.6:
            before = rng.choice(rows)
            tokens = before.token_ids[: rng.choice(before.learnt).end]
        elif rng.random() < 0.3:  # another conversation
            tokens = ids(rng, rng.randint(1, 4), vocab_size)
        learnt = []
        for turn in turns:
            tokens += ids(rng, rng.randint(0, 2), vocab_size)  # what a user or a tool says
            start = len(tokens)
            tokens += ids(rng, rng.randint(1, 4), vocab_size)
            learnt.append(TurnSpan(turn, start, len(tokens)))
        rows.append(row_of(rng, tokens, learnt, rewards=rewards))
    total = float(sum(reward for row in rows for reward in row.rewards)) + rng.choice((0.0, 0.5, 1.0))
    return Sample(prompt, tuple(rows), total, text="an episode", truncated=rng.random() < 0.5)


def row_of(rng: random.Random, tokens: list[int], learnt: Sequence[TurnSpan], *, rewards: bool = False) -> Row:
    """The row with these tokens, random log-probs, and two versions of the weights."""
    length = sum(span.end - span.start for span in learnt)
    cut = rng.randint(0, length)
    return Row(
        token_ids=tokens,
        learnt=tuple(learnt),
        log_probs=[-rng.random() for _ in range(length)],
        versions=(VersionSpan(2, 0, cut), VersionSpan(3, cut, length)),
        finish_reason=rng.choice(("stop", "length")),
        rewards=tuple(rng.choice((0.0, 0.25, -1.0)) for _ in learnt) if rewards else (),
    )


def ids(rng: random.Random, length: int, vocab_size: int) -> list[int]:
    return [rng.randrange(vocab_size) for _ in range(length)]


def groups_of_rows(seed: int, num_groups: int, n: int = 4, **how: object) -> list[list[Sample]]:
    """Groups of samples with one to three rows."""
    rng = random.Random(seed)
    groups = []
    for visit in range(num_groups):
        prompt = Prompt(f"0-{visit}", ids(rng, rng.randint(1, 4), 50), "x")
        groups.append([random_sample(rng, prompt, **how) for _ in range(n)])
    return groups
