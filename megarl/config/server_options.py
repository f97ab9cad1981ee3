"""Reads the options in `rollout.sglang.args`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def options_of(args: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Each option with its values; `--name=value` and `--name value` are the same.

    Example: list(options_of(["--dtype=half", "--lora", "a", "b"])) -> [("--dtype", "half"), ("--lora", "a b")]
    """
    name, values = "", list[str]()
    for word in args:
        if word.startswith("--"):
            if name:
                yield name, " ".join(values)
            name, _, value = word.partition("=")
            values = [value] if value else []
        else:
            values.append(word)
    if name:
        yield name, " ".join(values)
