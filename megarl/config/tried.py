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
    tried: tuple[object, ...]  # values, as /server_info has them
    why: str  # what is wrong with all others
    expected: str = "no such option"
    told: tuple[object, ...] = ()  # tried too, but only as SGLang's own choice: given, they would undo ours
    is_new: bool = False  # SGLang 0.5.17 lacks it


_COPIES = "no push knows the copies inside a server"
_POSITIONS = "nothing was pushed to servers that cut attention by positions"
_PLACES = "experts are then not where a push writes them"
_WHOLE = "they are then cut over other ranks than a push writes to"
_OTHER = "the model may hold other tensors than a push writes"
_ELSEWHERE = "weights are then not where a push writes them"
_NCCL = "it changes NCCL's variables inside the server, and NCCL then hangs between it and the trainer"
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
        ("triton",),
        "other kernels lay experts out anew, so that what is held is not what was pushed",
        "triton",
        told=("auto",),
    ),
    "enable_eplb": Option(("--enable-eplb",), (False,), _PLACES),
    "init_expert_location": Option(("--init-expert-location",), ("trivial",), _PLACES),
    "ep_num_redundant_experts": Option(("--ep-num-redundant-experts",), (0,), _PLACES),
    "speculative_algorithm": Option(
        ("--speculative-algorithm",), (None,), "a push would go to a draft model too, which holds other weights"
    ),
    "enforce_shared_experts_fusion": Option(("--enforce-shared-experts-fusion",), (False,), _PLACES),
    "enable_dense_mlp_attn_tp": Option(("--enable-dense-mlp-attn-tp",), (False,), _WHOLE, is_new=True),
    "enable_shared_experts_attn_tp": Option(("--enable-shared-experts-attn-tp",), (False,), _WHOLE, is_new=True),
    "shared_experts_tp_size": Option(("--shared-experts-tp-size",), (None,), _WHOLE, is_new=True),
    "model_impl": Option(("--model-impl",), ("auto", "sglang"), _OTHER),
    "json_model_override_args": Option(("--json-model-override-args",), ("{}",), _OTHER),
    "modelopt_quant": Option(("--modelopt-quant",), (None,), _OTHER, "rollout.quantization"),
    "cpu_offload_gb": Option(("--cpu-offload-gb",), (0,), _ELSEWHERE),
    "offload_group_size": Option(("--offload-group-size",), (-1,), _ELSEWHERE),
    "kt_weight_path": Option(("--kt-weight-path",), (None,), _ELSEWHERE),
    "dwdp_size": Option(("--dwdp-size",), (1,), _ELSEWHERE),
    "enable_symm_mem": Option(("--enable-symm-mem",), (False,), _NCCL),
    "enable_nccl_nvls": Option(("--enable-nccl-nvls",), (False,), _NCCL),
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
_NAMES = (*_BY_NAME, *_KEYS, _CONFIG)


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


def _meant(name: str) -> str:
    """The first name of ours that this one begins: SGLang's parser takes abbreviations too, but --model is a name."""
    return name if name in (*_NAMES, "--model") else next((each for each in _NAMES if each.startswith(name)), name)


def untried(info: Mapping[str, Any]) -> Iterator[tuple[str, Option]]:
    """Of what a server says of itself, each option with a value that was not tried, or of which SGLang says nothing."""
    for field, option in TRIED.items() if info.get("version") != "megarl-hf" else ():
        if field in info and info[field] not in (*option.tried, *option.told):
            yield f"{option.names[0]}={info[field]}", option
        elif field not in info and not option.is_new:
            yield f"an unknown {option.names[0]}", option
