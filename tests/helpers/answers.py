"""Completions of which only the text matters, as rewards see them."""

from megarl.samples.sample import Completion, VersionSpan


def completion(text: str) -> Completion:
    return Completion([1], [0.0], "stop", (VersionSpan(0, 0, 1),), text)
