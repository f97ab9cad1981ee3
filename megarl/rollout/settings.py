"""What is the same for all requests of a run to its servers."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.rollout.wire_columns import EngineColumn


@dataclass(frozen=True)
class GenerationSettings:
    """Example: GenerationSettings(timeout_s=120, fenced=True).  Collectors and their pools get it whole."""

    # Time limit of one attempt; then the server must return what it has generated.  A completion has no time limit.
    timeout_s: float
    max_in_flight: int = 512  # completions that a collector requests at a time
    piece_tokens: int = 0  # new tokens of one request at most; 0: no limit
    retries: int = 4  # after the first attempt
    rest_s: float = 1.0  # in which a server gets no request after a failure, twice as long after each further one
    fenced: bool = False  # a server gets no request before a `ServerState` says that it generates
    salted: bool = False  # the servers know salts of their prefix caches (Abilities.cache_salt), and keep KV in a push
    dp_ranks: int = 1  # data-parallel ranks of each server, each with a prefix cache of its own
    joins: bool = False  # short answers that are asked for at once travel in one request: see `Joined`
    columns: tuple[EngineColumn, ...] = ()  # what is to travel with the tokens of every completion
    num_ids: int | None = None  # of the model's vocabulary, with its padding; None: not known
    reports_unfit: bool = False  # a server that hangs, or fails again and again, is fenced and reported to its owner
    slow_factor: float | None = None  # and so is one whose replies take so many times as long as those of others
