"""Run functions on n ranks, each a process of its own, with a limit on the time.

They speak over gloo on CPUs; with MEGARL_TEST_DEVICE=cuda in the environment over NCCL, each on a GPU of its own.
"""

import gc
import multiprocessing
import os
import pickle
import queue
import time
import traceback
from collections.abc import Callable
from typing import Any, Self

from megarl.io.sockets import interface_variables
from megarl.processes.channels.store import StoreHost, StorePlace, join_world
from megarl.processes.ranks import OWN_ADDRESS, STORE, STORE_TOKEN
from megarl.servers.nccl import VARIABLES

DEVICE = os.environ.get("MEGARL_TEST_DEVICE", "cpu")  # | cuda
# What each rank needs: loaded once, in a process that only forks, since importing costs more than most cases.
PRELOADED = ["torch.distributed", "torch._dynamo", "megarl.roles.worker", "transformers.models.auto"]


class Ranks:
    """The processes of one initialised world; a function that fails ends them.

    Example: with Ranks(2) as ranks: ranks.run(fn, 1)
    """

    def __init__(self, n: int) -> None:
        self._n = n
        self._processes: list[Any] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, fn: Callable[..., Any], *args: Any, timeout_s: float = 60.0) -> list[Any]:
        """fn(*args) on every rank -> the result of each (picklable).  The first call starts the processes.

        `fn` is a module's top-level function and leaves no Megatron groups behind.  The first rank that raises makes
        this raise RuntimeError with its number and traceback; a rank that is silent for `timeout_s` makes it raise
        TimeoutError.
        """
        if not self._processes:
            self._start()
        try:
            for calls in self._calls:
                calls.put(pickle.dumps((fn, args)))
            return self._collect(time.monotonic() + timeout_s)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """No process is left behind."""
        for process in self._processes:
            process.kill()
            process.join()
        if self._processes:
            self._store.close()
        self._processes = []

    def _start(self) -> None:
        # A process that asked CUDA for anything cannot be forked, and imports ask.
        context = multiprocessing.get_context("spawn" if DEVICE == "cuda" else "forkserver")
        context.set_forkserver_preload(PRELOADED)
        self._results, self._calls = context.Queue(), [context.Queue() for _ in range(self._n)]
        # The meeting point stands before the ranks import torch: a port that was only looked for may be taken by then.
        self._store = StoreHost("127.0.0.1")
        # Not daemons: those may not have children, and Megatron forks the writers of a checkpoint.
        self._processes = [
            context.Process(target=_rank, args=(rank, self._n, self._store.place, calls, self._results))
            for rank, calls in enumerate(self._calls)
        ]
        for process in self._processes:
            process.start()

    def _collect(self, deadline: float) -> list[Any]:
        done: dict[int, Any] = {}
        while len(done) < self._n:
            try:
                rank, error, value = self._results.get(timeout=0.5)
            except queue.Empty:
                if ended := self._ended():
                    raise RuntimeError(ended) from None
                if time.monotonic() > deadline:
                    raise TimeoutError(f"no answer from ranks {sorted(set(range(self._n)) - set(done))}") from None
                continue
            if error:  # perhaps only because another rank is gone
                raise RuntimeError(f"rank {rank} raised:\n{error}{self._ended()}")
            done[rank] = pickle.loads(value)
        return [done[rank] for rank in range(self._n)]

    def _ended(self) -> str:
        """The ranks whose processes are no more."""
        codes = [process.exitcode for process in self._processes]
        return "; ".join(f"rank {rank} ended with status {code}" for rank, code in enumerate(codes) if code is not None)


def run_ranks(n: int, fn: Callable[..., Any], *args: Any, timeout_s: float = 60.0) -> list[Any]:
    """fn(*args) once on n ranks of their own: see `Ranks.run`."""
    with Ranks(n) as ranks:
        return ranks.run(fn, *args, timeout_s=timeout_s)


def _rank(rank: int, n: int, place: StorePlace, calls: Any, results: Any) -> None:
    env = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": n, "LOCAL_WORLD_SIZE": n, OWN_ADDRESS: "127.0.0.1"}
    env |= {STORE: place.address, STORE_TOKEN: place.token}
    env |= VARIABLES  # as the ranks of a run
    os.environ.update({**interface_variables("127.0.0.1"), **{name: str(value) for name, value in env.items()}})
    if DEVICE == "cpu":  # also where there are GPUs
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import torch
    from torch.utils._pytree import tree_map_only

    from megarl.mcore import cpu
    from megarl.mcore.setup import backend_of, device_for

    gc.freeze()  # what is loaded stays; looking through all of it after each case would cost more than the case
    torch.set_num_threads(1)
    cpu.activate()
    if DEVICE == "cuda":
        torch.cuda.set_device(device_for(DEVICE))
    join_world(backend_of(DEVICE), 1800.0)
    parent = multiprocessing.parent_process()
    assert parent is not None, "a rank is a child"
    while parent.is_alive():
        try:
            call = calls.get(timeout=1.0)
        except queue.Empty:
            continue
        try:
            fn, args = pickle.loads(call)
            # Bytes, because torch would send tensors as handles of this process.
            results.put((rank, None, pickle.dumps(tree_map_only(torch.Tensor, torch.Tensor.cpu, fn(*args)))))
        except BaseException:  # torch's CheckpointException is no Exception
            results.put((rank, traceback.format_exc(), None))
        del call, fn, args
        gc.collect()  # the groups of a model that the case still held, each with three threads of gloo's
