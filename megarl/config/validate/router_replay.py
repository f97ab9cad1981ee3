"""Checks whether the model has experts to replay, and whether the servers can report them."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.config.schema import Config
from megarl.config.validate import models

# Options of SGLang with which the experts that it keeps for a token need not be those that wrote it.  It keeps them
# beside the KV of a token, and notes them in one buffer for the batch that is computed (srt/state_capturer/base.py).
_FROM_ELSEWHERE = "KV that comes back from elsewhere has lost its experts"
WITHOUT_ROUTES = {
    "--enable-hierarchical-cache": "KV that comes back from host memory has lost its experts",
    "--enable-hicache": "KV that comes back from host memory has lost its experts",  # the same option
    "--enable-lmcache": _FROM_ELSEWHERE,
    "--enable-flexkv": _FROM_ELSEWHERE,
    "--radix-cache-backend": _FROM_ELSEWHERE,
    "--enable-prefill-cp": "each GPU notes experts of its part of a prompt, and they are taken for those of all of it",
    "--enable-two-batch-overlap": "the experts of one half of a batch are written over those of the other half",
    "--enable-pdmux": "prompts and new tokens are computed at the same time, and their experts written over each other",
}


def contradictions(config: Config) -> Iterator[str]:
    """One sentence for each invalid combination."""
    chosen = config.actor.router_replay
    if chosen == "off":
        return
    numbers = models.model_numbers(config, "actor")
    if numbers.num_hidden_layers is not None and not numbers.num_experts:
        yield f"actor.router_replay={chosen}: the model has no experts; expected off"
    if chosen == "rollout" and config.rollout.engine != "hf":
        for word in config.rollout.sglang.args:
            if why := WITHOUT_ROUTES.get(word.split("=")[0]):
                yield f"rollout.sglang.args={word}: {why}; expected actor.router_replay=off or old, or no such option"
