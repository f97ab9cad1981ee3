"""The batching engine of the hf server in this process, without HTTP."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from megarl.hf_server.calls import read_call, write_reply
from megarl.hf_server.model import HFModel
from megarl.hf_server.scheduler import HFEngine

Answer = Callable[[Sequence[Mapping[str, Any]]], list[Any]]


@contextmanager
def running(model: HFModel, **limits: Any) -> Iterator[tuple[HFEngine, Answer]]:
    """An engine and a function that answers bodies, all submitted at once."""
    deaths: list[BaseException] = []
    done = threading.Semaphore(0)

    def on_death(error: BaseException) -> None:
        deaths.append(error)
        done.release()

    limits = {"max_running": 8, "max_total_tokens": None, **limits}
    engine = HFEngine(
        model,
        random_seed=3,
        weight_version="0",
        on_done=lambda calls: [done.release() for _ in calls],
        on_death=on_death,
        **limits,
    )

    def answer(bodies: Sequence[Mapping[str, Any]]) -> list[Any]:
        calls = [read_call(body, model, engine.max_total_tokens) for body in bodies]
        for call in calls:
            engine.submit(call)
        for _ in calls:
            assert done.acquire(timeout=30)
            if deaths:
                raise deaths[0]
        return [write_reply(call, body) for call, body in zip(calls, bodies, strict=True)]

    engine.start()
    yield engine, answer
    engine.stop()


def body(prompt: Sequence[int], n: int = 1, salt: str | None = None, **params: Any) -> dict[str, Any]:
    """A request for n completions."""
    sampling = {"n": n, **params}
    return {"input_ids": list(prompt), "sampling_params": sampling, "return_logprob": True, "cache_salt": salt}
