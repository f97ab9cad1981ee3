"""Settings of pushes: how ranks reach the servers, and the canary that servers have to reproduce."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import torch

from megarl.config import Config
from megarl.config.placement import gpu_seats
from megarl.data.prompts import Prompts
from megarl.roles.handles import Actor
from megarl.samples.batch import Batch
from megarl.weights.push.settings import PushSettings
from megarl.weights.verify.canary import Canary

# Maximum difference of a server's log-probs of the canary: its kernels and its order of summation are different.
# Tensors in the wrong place, which the canary has to detect, cause differences of 1 and more.
# fp8, which has 3 bits of mantissa, gets half of that.
CANARY_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.3, "fp8": 0.5}
CANARY_TOKENS = 64


def keeps_kv(config: Config) -> bool:
    """Whether servers keep their KV in a push; in any other push they flush their prefix caches."""
    return config.rollout.ahead > 0 and config.rollout.update == "in_place"


def drains(config: Config) -> bool:
    """Whether a push waits for what is generated."""
    return config.rollout.ahead > 0 and config.rollout.update == "drain"


def push_settings(config: Config, urls: Sequence[str], token: str) -> PushSettings:
    """How the ranks reach the servers; only adapters are pushed if actor.lora.push=adapter."""
    rollout = config.rollout
    # A retracted request would come back with the experts of the pass that computed its KV again; an aborted one keeps
    # those of its tokens, and another request goes on from there.
    else_mode = "abort" if config.actor.router_replay == "rollout" else "retract"
    return PushSettings(
        urls=tuple(urls),
        token=token,
        dtype=rollout.dtype,
        bucket_bytes=rollout.bucket_bytes,
        # A push waits for a server several times, and must end before the call of the ranks times out.
        timeout_s=min(rollout.request_timeout_s, config.trainer.call_timeout_s / 6),
        pause_mode="in_place" if keeps_kv(config) else else_mode,
        adapters_kept=config.adapters_kept,
        drafts=config.drafts,
        transport=rollout.push,
        check_every=rollout.check_every,
        export_folder=export_folder(config),
        gpus=gpu_seats(config, urls),
    )


def export_folder(config: Config) -> str | None:
    """Where servers read what a push must leave in them; None: in a temporary folder, if they are on this machine.

    Digests of quantized weights are not computed here, so such servers have to read the folder on any machine.
    """
    is_apart = config.trainer.nnodes > 1 or bool(config.rollout.urls or config.rollout.join)
    return str(config.trainer.run_dir / "push_check") if config.rollout.quantization != "none" and is_apart else None


def canary_tokens(config: Config, prompts: Prompts) -> list[int]:
    """The first tokens of the prompts, as many as a canary may have."""
    longest = min(CANARY_TOKENS, config.data.max_prompt_length + config.data.max_response_length)
    words = (token for prompt in prompts.all(CANARY_TOKENS) for token in prompt.token_ids)
    return list(islice(words, longest))


def canary(config: Config, actor: Actor, ids: list[int]) -> Canary:
    """A prompt and its log-probs under the actor, which every server has to reproduce after a push."""
    batch = Batch(torch.tensor(ids), torch.tensor([len(ids)]), {})
    log_probs = actor.log_probs(batch, temperature=1.0, inputs=())[1:].tolist()
    precision = config.rollout.dtype if config.rollout.quantization == "none" else config.rollout.quantization
    return Canary(tuple(ids), tuple(log_probs), CANARY_TOLERANCE[precision])
