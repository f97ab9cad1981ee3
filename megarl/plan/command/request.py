"""The options of `megarl plan`; all other words are settings as in `megarl train`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from megarl.options import Options, count, positive


class Request(NamedTuple):
    """The options of a command line.  Example: Request(gpu="h200", gpus=128)."""

    gpu: str | None = None
    gpus: int | None = None
    gpus_per_node: int | None = None
    nic: float | None = None  # Gbit/s
    link: float | None = None  # GB/s
    host: float | None = None  # GB
    prompt_tokens: float | None = None
    response_tokens: float | None = None
    search: bool = False
    json: bool = False


def parse(words: Sequence[str]) -> tuple[Request, list[str]]:
    """The options among these words, and the other words.  Raises: ValueError of one sentence."""
    given, settings = OPTIONS.values_and_settings(words)
    return Request(**given), settings


OPTIONS = Options(
    "plan",
    """All of it is predicted, from the model's numbers, data sheets of GPUs, and constants fitted on published
measurements (benchmarks/results has the table of errors). Nothing is started, and no GPU is asked.""",
    [
        "megarl plan recipe=grpo_qwen2_5_72b_8x8h100",
        "megarl plan recipe=grpo_qwen2_5_72b_8x8h100 --gpu h200 --gpus 128 --search",
        "megarl plan model=qwen3_8b layout=8x80 --response-tokens 3000 --json",
    ],
    usage="megarl plan recipe=NAME | model=NAME layout=NAME [key=value ...] [--option ...]",
)
KINDS: dict[str, Callable[[str], object]] = {"--gpu": str, "--gpus": count, "--gpus-per-node": count}
for option, about in {
    "--gpu": "a100 h100 h800 h200 h20 b200 gb200; unset = what the layout's name means (64x80: h100)",
    "--gpus": "of the whole run, servers' own among them; unset = as configured",
    "--gpus-per-node": "of a machine; unset = as configured",
    "--nic": "Gbit/s of one GPU to other machines; unset = as the data sheet has it",
    "--link": "GB/s of one GPU to others of its machine, one direction; unset = the same",
    "--host": "GB of host memory of a machine; unset = predicted, but not compared",
    "--prompt-tokens": "mean length of a prompt; unset = a quarter of data.max_prompt_length",
    "--response-tokens": "mean length of a completion; unset = half of data.max_response_length",
}.items():
    kind = KINDS.get(option, positive)
    OPTIONS.add_argument(option, type=kind, metavar="NAME" if kind is str else "N", help=about)
OPTIONS.add_argument("--search", action="store_true", help="look for better layouts, and say why they are better")
OPTIONS.add_argument("--json", action="store_true", help="one JSON object in place of tables")
