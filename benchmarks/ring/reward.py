"""The reward of a measured run.  A file of its own: every process that computes rewards imports it."""

from __future__ import annotations

from megarl.samples.sample import Completion, Prompt


def score(prompt: Prompt, completion: Completion) -> float:
    """A number that differs between the completions of a prompt, so that each of their tokens is learnt from."""
    return (sum(completion.token_ids) % 7) / 6
