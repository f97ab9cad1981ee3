"""Colocation of servers and trainer on the same GPUs: servers release their memory while the trainer computes.

`Colocation` records what each server has released, because stock SGLang crashes if it resumes memory that it has not
released.  The record outlives a restart of the ranks; a restarted server has released nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass

import torch

from megarl.config import Config
from megarl.config.placement import check_shared_seats, servers_map_memory
from megarl.rollout.client import ServerClient, of_all
from megarl.weights.push.gpu_handles import check_can_be_mapped
from megarl.weights.verify.canary import Canary, disagreement

WEIGHTS, CACHE, GRAPHS = "weights", "kv_cache", "cuda_graph"
GENERATION = (CACHE, GRAPHS)  # what a server needs besides its weights
ALL = (WEIGHTS, *GENERATION)


class Colocation:
    """Example:

    colocation.release_memory(url); ... train ...
    colocation.resume_memory(url, [WEIGHTS]); ... push ...; colocation.resume_memory(url)
    """

    def __init__(self, token: str, *, timeout_s: float) -> None:
        self._token, self._timeout_s = token, timeout_s
        self._given: dict[str, tuple[str, ...]] = {}

    def release_memory(self, url: str, what: Sequence[str] = ALL) -> None:
        """Abort the server's running requests and release its memory.  Raises ServerError if that fails.

        Released weights are lost: the server needs a push before it generates again.
        """
        lent = self._given.get(url, ())
        new = tuple(each for each in what if each not in lent)
        if not new:
            return
        with self._client(url) as engine:
            engine.pause("abort")  # the server refuses to release memory while a request runs, even an abandoned one
            if not lent:  # else nothing has run since, and the cache may be released already
                engine.wait_until_idle()
            engine.release_memory(new)
        self._given[url] = (*lent, *new)

    def resume_memory(self, url: str, what: Sequence[str] = ALL) -> None:
        """Resume the released memory of these kinds; with all of it back, the server continues generation.

        Raises ServerError if that fails.
        """
        lent = self._given.get(url, ())
        back = tuple(each for each in lent if each in what)
        if not back:
            return
        rest = tuple(each for each in lent if each not in what)
        with self._client(url) as engine:
            engine.resume_memory(back)
            if not rest:
                engine.resume()
        self._given[url] = rest

    def forget(self, url: str) -> None:
        """Clear the record of a server whose process has ended."""
        self._given.pop(url, None)

    def examine(self, canary: Canary, urls: Sequence[str], adapter: str | None = None) -> dict[str, str]:
        """url -> why the canary failed, for servers that have resumed all their memory."""

        def ask(url: str) -> list[float]:
            with self._client(url) as engine:
                return engine.prompt_log_probs(canary.prompt_ids, adapter=adapter)

        heard, silent = of_all(urls, ask)
        return {url: str(error) for url, error in silent.items()} | disagreement(canary, heard)

    def _client(self, url: str) -> closing[ServerClient]:
        return closing(ServerClient(url, self._token, timeout_s=self._timeout_s))


@dataclass(frozen=True)
class Turns:
    """How servers and trainer use the same GPUs in turn."""

    memory: Colocation
    canary: Callable[[], Canary]  # computes it on the trainer
    lends: Sequence[str] = ALL  # the memory that servers release while the trainer computes


def check_shared_gpus(config: Config) -> None:
    """Refuse servers on the actor's GPUs that no push could reach: `check_shared_seats`, `check_can_be_mapped`."""
    if not uses_gpus(config):
        return
    check_shared_seats(config)
    if servers_map_memory(config):
        check_can_be_mapped(os.environ)


def uses_gpus(config: Config) -> bool:
    """Whether ranks and servers of a run use GPUs here."""
    device = config.trainer.device
    return device == "cuda" or (device == "auto" and torch.cuda.is_available())
