"""Host memory of routing replay: the experts of every token, in the driver and in SGLang's servers.

GPUs hold them for the micro-batches under way only, which is far below what memory.py keeps in reserve.
"""

from __future__ import annotations

from megarl.plan.job import Job
from megarl.plan.time.constants import CONSTANTS
from megarl.plan.time.serving import Server
from megarl.routed_experts import RoutedExperts

COPIES = 4  # of a batch in training at most: its samples, the whole, an optimizer step's part, and the messages of that
SGLANG_BYTES = 4  # of an expert's number; SGLang keeps one for every layer, also for those without experts


def driver_bytes(job: Job) -> int:
    """The batch in training, and what is generated ahead of it."""
    of = RoutedExperts.of(job.hf)
    if job.router_replay == "off" or of is None:
        return 0
    ahead = job.ahead if job.router_replay == "rollout" else 0
    return int(job.tokens * (COPIES + ahead)) * of.bytes_per_token


def server_bytes(job: Job) -> int:
    """Of one server: pinned memory for every token of its KV cache."""
    of = RoutedExperts.of(job.hf)
    if job.router_replay != "rollout" or of is None or not job.num_servers:
        return 0
    server = Server(job, CONSTANTS)
    tokens = job.attention_dp * int(server.cache_bytes / server.token_bytes)
    return tokens * of.num_layers * of.chosen * SGLANG_BYTES


def machine_bytes(job: Job) -> int:
    """Of the servers on one machine."""
    return server_bytes(job) * max(1, min(job.num_servers, job.gpus_per_node // job.server_gpus))
