"""Options of SGLang with which pushes were tried; every other value is refused, before the start and after it.

A push writes to where `weights.mapping.server_map` says that a server holds a tensor.  Each option here moves tensors,
lays them out otherwise, or adds a model that holds others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from megarl.arch.sglang_config import OVERRIDE, is_override


@dataclass(frozen=True)
class Option:
    """An option of SGLang's command line."""

    names: tuple[str, ...]  # its spellings
    tried: tuple[object, ...]  # values, as /server_info has them
    why: str  # what is wrong with all others
    expected: str
    told: tuple[object, ...] = ()  # tried too, but only as SGLang's own choice: given, they would undo ours
    is_new: bool = False  # SGLang 0.5.17 lacks it


# NAME,OTHER NAME=VALUES that were tried ... | what is wrong with all others | what is expected then
_OPTIONS = """
--pp-size,--pipeline-parallel-size=1 | no push knows which stage holds a layer
--dp-size,--data-parallel-size=1 | no push knows the copies inside a server | \
rollout.num_servers, or rollout.attention_dp
--moe-dp-size,--moe-data-parallel-size=1 | no push knows the copies inside a server
--attn-cp-size,--attention-context-parallel-size=1 --dcp-size,--decode-context-parallel-size=1 | \
nothing was pushed to servers that cut attention by positions
--moe-dense-tp-size=null | dense layers are then whole on each rank
--moe-a2a-backend=none | shared experts are then whole on each rank
--enable-eplb=false --init-expert-location=trivial --ep-num-redundant-experts=0 \
--enforce-shared-experts-fusion=false | experts are then not where a push writes them
--speculative-algorithm=null,NEXTN,EAGLE | a push has no weights for such a draft model | NEXTN, with actor.mtp
--speculative-token-map=null --enable-multi-layer-eagle=false | a push would not reach all weights of the draft model
--speculative-accept-threshold-single=1.0 --speculative-accept-threshold-acc=1.0 | \
completions are then not drawn from the policy
--model-impl=auto,sglang --json-model-override-args='{}' | the model may hold other tensors than a push writes
--modelopt-quant=null | the model may hold other tensors than a push writes | rollout.quantization
--cpu-offload-gb=0 --offload-group-size=-1 --kt-weight-path=null --dwdp-size=1 | \
weights are then not where a push writes them
--enable-symm-mem=false --enable-nccl-nvls=false | \
it changes NCCL's variables inside the server, and NCCL then hangs between it and the trainer
"""
_NEW_OPTIONS = """
--enable-dense-mlp-attn-tp=false --enable-shared-experts-attn-tp=false --shared-experts-tp-size=null | \
they are then cut over other ranks than a push writes to
"""


def _options(table: str, *, is_new: bool = False) -> Iterator[Option]:
    for line in filter(None, table.splitlines()):
        options, why, *expected = (cell.strip() for cell in line.split("|"))
        for names, _, values in (option.partition("=") for option in options.split()):
            tried = tuple(yaml.safe_load(f"[{values}]"))
            yield Option(tuple(names.split(",")), tried, why, "".join(expected) or "no such option", is_new=is_new)


_ANEW = "other kernels lay experts out anew, so that what is held is not what was pushed"
TRIED: dict[str, Option] = {  # by their names in /server_info
    option.names[0].removeprefix("--").replace("-", "_"): option
    for option in (
        *_options(_OPTIONS),
        Option(("--moe-runner-backend",), ("triton",), _ANEW, "triton", told=("auto",)),
        *_options(_NEW_OPTIONS, is_new=True),
    )
}
_BY_NAME = {name: option for option in TRIED.values() for name in option.names}
_KEYS = {  # what a key of ours says
    **dict.fromkeys(("--tp-size", "--tensor-parallel-size"), "rollout.tensor_model_parallel_size"),
    **dict.fromkeys(("--ep-size", "--expert-parallel-size", "--ep"), "rollout.expert_parallel_size"),
    **dict.fromkeys(
        ("--attn-dp-size", "--attention-data-parallel-size", "--enable-dp-attention"), "rollout.attention_dp"
    ),
}
_CONFIG = "--config"
_DRAFTS = "--speculative-algorithm"
DRAFTS_ON_GPUS = (  # `_verify_uses_greedy` in SGLang's speculative/eagle_utils.py
    "with --speculative-algorithm SGLang takes the likeliest token whatever the temperature, but on GPUs; expected one"
)
_NAMES = (*_BY_NAME, *_KEYS, _CONFIG)


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


def refused(args: Sequence[str], *, pushes: bool = True) -> Iterator[str]:
    """Of `rollout.sglang.args`, a sentence for each option that a key sets, or with a value that was not tried.

    `pushes`: whether weights are pushed to the servers; what would move them counts only then.
    """
    for name, value in options_of(args):
        given = f"rollout.sglang.args={name}{f'={value}' if value else ''}"
        name = _meant(name)
        if key := _KEYS.get(name):
            yield f"{given}: servers are placed and get their weights by {key}; expected that key"
        option = _BY_NAME.get(name) if pushes else None
        if option is not None and value not in map(str, option.tried):
            yield f"{given}: {option.why}; expected {option.expected}"
        if name == _CONFIG:
            yield f"{given}: what a file says is not checked; expected its options here"


def asks_to_draft(args: Sequence[str]) -> bool:
    """Whether servers of these arguments draft with MTP layers: /server_info says EAGLE of NEXTN too."""
    return any(_meant(name) == _DRAFTS for name, _ in options_of(args))


def _meant(name: str) -> str:
    """The first name of ours that this one begins: SGLang's parser takes abbreviations too, but --model is a name."""
    return name if name in (*_NAMES, "--model") else next((each for each in _NAMES if each.startswith(name)), name)


def untried(info: Mapping[str, Any]) -> Iterator[tuple[str, Option]]:
    """Of what a server says of itself, each option with a value that was not tried, or of which SGLang says nothing."""
    for field, option in TRIED.items() if info.get("version") != "megarl-hf" else ():
        if OVERRIDE in option.names and is_override(info.get(field)):
            continue
        if field in info and info[field] not in (*option.tried, *option.told):
            yield f"{option.names[0]}={info[field]}", option
        elif field not in info and not option.is_new:
            yield f"an unknown {option.names[0]}", option
