"""Servers that stand on the trainer's GPUs: how they give memory back while the trainer computes.

`Colocation` knows which server gave what back, since stock SGLang dies of taking what it never gave.  It outlives a
restart of the ranks; a server that is started again has given nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from megarl.config import Config
from megarl.config.placement import check_shared_seats
from megarl.rollout.client import ServerClient, ServerError
from megarl.weights.verify.canary import Canary, disagreement

WEIGHTS, CACHE = "weights", "kv_cache"
ALL = (WEIGHTS, CACHE)


class Colocation:
    """Example: it.release_memory(url); ... train ...; it.resume_memory(url, [WEIGHTS]); push; it.resume_memory(url)."""

    def __init__(self, token: str, *, timeout_s: float) -> None:
        self._token, self._timeout_s = token, timeout_s
        self._given: dict[str, tuple[str, ...]] = {}

    def release_memory(self, url: str, what: Sequence[str] = ALL) -> None:
        """The server ends what it still writes and gives memory back.  Raises ServerError where it does not.

        Weights that were given back are lost: they want a push.
        """
        lent = self._given.get(url, ())
        new = tuple(each for each in what if each not in lent)
        if not new:
            return
        engine = ServerClient(url, self._token, timeout_s=self._timeout_s)
        try:
            engine.pause("abort")  # it refuses to give memory while a request runs that nobody waits for any more
            engine.release_memory(new)
        finally:
            engine.close()
        self._given[url] = (*lent, *new)

    def resume_memory(self, url: str, what: Sequence[str] = ALL) -> None:
        """It takes back what it gave of this, and with the last of it serves again.  Raises ServerError where not."""
        lent = self._given.get(url, ())
        back = tuple(each for each in lent if each in what)
        if not back:
            return
        rest = tuple(each for each in lent if each not in what)
        engine = ServerClient(url, self._token, timeout_s=self._timeout_s)
        try:
            engine.resume_memory(back)
            if not rest:
                engine.resume()
        finally:
            engine.close()
        self._given[url] = rest

    def forget(self, url: str) -> None:
        """The process that had given is gone."""
        self._given.pop(url, None)

    def examine(self, canary: Canary, urls: Sequence[str], adapter: str | None = None) -> dict[str, str]:
        """url -> why it is not to be believed, of servers that have all their memory again."""

        def ask(url: str) -> list[float] | str:
            engine = ServerClient(url, self._token, timeout_s=self._timeout_s)
            try:
                return engine.prompt_log_probs(canary.prompt_ids, adapter=adapter)
            except ServerError as error:
                return str(error)
            finally:
                engine.close()

        with ThreadPoolExecutor(max(1, len(urls)), thread_name_prefix="canary") as threads:
            answers = dict(zip(urls, threads.map(ask, urls), strict=True))
        silent = {url: answer for url, answer in answers.items() if isinstance(answer, str)}
        heard = {url: answer for url, answer in answers.items() if not isinstance(answer, str)}
        return silent | disagreement(canary, heard)


def check_shared_gpus(config: Config) -> None:
    """Refuse servers on the actor's GPUs that no push would reach (`check_shared_seats`)."""
    device = config.trainer.device
    if config.rollout.engine == "sglang" and (device == "cuda" or (device == "auto" and torch.cuda.is_available())):
        check_shared_seats(config)
