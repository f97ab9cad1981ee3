"""Checks whether servers draw as a run says, and report what training needs: tokens to draw from, and experts."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.arch.sglang_options import options_of
from megarl.config.schema import Config
from megarl.config.validate import models

# Of SGLang, which adds what it says to every request: fields that the request has not, such as a penalty.
PREFERRED = "--preferred-sampling-params"
WHY_NOT_PREFERRED = "a server would draw from other logits than those of which the trainer computes log-probs"
LARGEST_REPLY = 1 << 30  # bytes that a client takes (rollout/protocol.py)
_LIMIT, _DEFAULT_LIMIT = "--sampling-mask-max-tokens", 4096  # of SGLang

# Options of SGLang with which the experts that it keeps for a token need not be those that generated it.  It keeps them
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
    "--speculative-algorithm": "what notes experts has no room for the tokens of drafts that are verified at once",
    "--enable-pdmux": "prompts and new tokens are computed at the same time, and their experts written over each other",
}


def largest_top_k(limit: int) -> int:
    """The largest top_k for servers that report at most `limit` tokens.

    Half of it: tokens that are as likely as the last of the k are drawn too, and SGLang ends a request with an error if
    all of them are more than the limit.
    """
    return limit // 2


def advice(config: Config) -> Iterator[str]:
    """One sentence for an evaluation that asks for the same answer several times."""
    val = config.rollout.val_kwargs
    if config.data.val_files and val.n > 1 and val.temperature == 0:
        why = "rollout.val_kwargs.temperature=0 is greedy, and gives the same answer each time"
        yield f"rollout.val_kwargs.n={val.n}: {why}; expected n=1, or a temperature above 0"


def contradictions(config: Config) -> Iterator[str]:
    """One sentence for each invalid combination."""
    yield from _replay(config)
    rollout = config.rollout
    if rollout.engine == "hf":
        return
    options = dict(options_of(rollout.sglang.args))
    if PREFERRED in options:
        yield f"rollout.sglang.args={PREFERRED}: {WHY_NOT_PREFERRED}; expected no such option"
    if not config.narrows_sampling:
        return
    limit = options.get(_LIMIT, "")
    most = largest_top_k(int(limit) if limit.isdecimal() else _DEFAULT_LIMIT)
    if not 1 <= rollout.top_k <= most:
        given = f"rollout.top_p={rollout.top_p}" if rollout.top_k == -1 else f"rollout.top_k={rollout.top_k}"
        found = f"SGLang reports from which tokens it drew only for a rollout.top_k of 1 to {most}, half of {_LIMIT}"
        yield f"{given}: {found}; expected one, or rollout.engine=hf"


def _replay(config: Config) -> Iterator[str]:
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
        if numbers.has_indexers:
            yield from _keys_of_indexers(config)


def _keys_of_indexers(config: Config) -> Iterator[str]:
    """What SGLang needs to report them: it can on GPUs with all heads only, and sends those of all layers."""
    rollout, data = config.rollout, config.data
    if rollout.attention_dp != rollout.tensor_model_parallel_size:
        why = "SGLang reports the keys that indexers choose only where each GPU has all heads"
        given = f"rollout.attention_dp={rollout.attention_dp} with actor.router_replay=rollout"
        yield f"{given}: {why}; expected {rollout.tensor_model_parallel_size}, or router_replay=off or old"
    hf, length = models.model_config(config, "actor"), data.max_prompt_length + data.max_response_length
    most = LARGEST_REPLY // (6 * hf["num_hidden_layers"] * hf["index_topk"])  # each int32 in base64
    if length > most:
        given = f"data.max_response_length={data.max_response_length} with actor.router_replay=rollout"
        why = f"with the keys of {length} tokens SGLang's answer has more than {LARGEST_REPLY:,} bytes"
        yield f"{given}: {why}; expected {most} tokens with the prompt's, or router_replay=off or old"
