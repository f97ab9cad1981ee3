"""Options of SGLang with which pushes were tried; every other value is refused, before the start and after it.

A push writes to where `weights.mapping.server_map` says that a server holds a tensor.  Each option here moves tensors,
lays them out otherwise, or adds a model that holds others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megarl.config.server_options import options_of


@dataclass(frozen=True)
class Option:
    """An option of SGLang's command line."""

    names: tuple[str, ...]  # its spellings
    tried: tuple[object, ...]  # values, as /server_info has them; the first is that of a server without the option
    why: str  # what is wrong with all others
    expected: str = "no such option"


_COPIES = "no push knows the copies inside a server"
_POSITIONS = "nothing was pushed to servers that cut attention by positions"
_PLACES = "experts are then not where a push writes them"
TRIED: dict[str, Option] = {  # by their names in /server_info
    "pp_size": Option(("--pp-size", "--pipeline-parallel-size"), (1,), "no push knows which stage holds a layer"),
    "dp_size": Option(
        ("--dp-size", "--data-parallel-size"), (1,), _COPIES, "rollout.num_servers, or rollout.attention_dp"
    ),
    "moe_dp_size": Option(("--moe-dp-size", "--moe-data-parallel-size"), (1,), _COPIES),
    "attn_cp_size": Option(("--attn-cp-size", "--attention-context-parallel-size"), (1,), _POSITIONS),
    "dcp_size": Option(("--dcp-size", "--decode-context-parallel-size"), (1,), _POSITIONS),
    "moe_dense_tp_size": Option(("--moe-dense-tp-size",), (None,), "dense layers are then whole on each rank"),
    "moe_a2a_backend": Option(("--moe-a2a-backend",), ("none",), "shared experts are then whole on each rank"),
    "moe_runner_backend": Option(
        ("--moe-runner-backend",),
        ("auto", "triton"),
        "other kernels lay experts out anew, so that what is held is not what was pushed",
        "triton",
    ),
    "enable_eplb": Option(("--enable-eplb",), (False,), _PLACES),
    "init_expert_location": Option(("--init-expert-location",), ("trivial",), _PLACES),
    "ep_num_redundant_experts": Option(("--ep-num-redundant-experts",), (0,), _PLACES),
    "speculative_algorithm": Option(
        ("--speculative-algorithm",), (None,), "a push would go to a draft model too, which holds other weights"
    ),
}
_BY_NAME = {name: option for option in TRIED.values() for name in option.names}
_KEYS = {  # what a key of ours says
    **dict.fromkeys(("--tp-size", "--tensor-parallel-size"), "rollout.tensor_model_parallel_size"),
    **dict.fromkeys(("--ep-size", "--expert-parallel-size", "--ep"), "rollout.expert_parallel_size"),
    **dict.fromkeys(
        ("--attn-dp-size", "--attention-data-parallel-size", "--enable-dp-attention"), "rollout.attention_dp"
    ),
}


def refused(args: Sequence[str]) -> Iterator[str]:
    """Of `rollout.sglang.args`, a sentence for each option with a value that was not tried."""
    for name, value in options_of(args):
        given = f"rollout.sglang.args={name}{f'={value}' if value else ''}"
        if key := _KEYS.get(name):
            yield f"{given}: servers are placed and get their weights by {key}; expected that key"
        option = _BY_NAME.get(name)
        if option is not None and value not in map(str, option.tried):
            yield f"{given}: {option.why}; expected {option.expected}"
        if name == "--config":
            yield f"{given}: what a file says is not checked; expected its options here"


def untried(info: Mapping[str, Any]) -> Iterator[tuple[str, Option]]:
    """Of what a server of SGLang says of itself, each option with a value that was not tried: as it was given."""
    for field, option in TRIED.items():
        if field in info and info[field] not in option.tried:
            yield f"{option.names[0]}={info[field]}", option
