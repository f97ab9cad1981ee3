"""The command line of `megarl convert`, without torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from megarl.plugins.options import Options, count, folder

DTYPES = ("float32", "bfloat16")
AXES = {
    "tp": "ranks of tensor parallelism",
    "pp": "pipeline ranks",
    "vpp": "interleaved stages of each pipeline rank",
    "first_stage_layers": "of the first pipeline rank; unset = as the others",
    "last_stage_layers": "of the last pipeline rank; unset = as the others",
    "ep": "ranks of expert parallelism",
    "etp": "ranks of tensor parallelism in an expert; unset = as tp",
}


class Request(NamedTuple):
    """The parsed command line.  Example: Request(Path("m"), Path("out"), layout={"tp": 2})."""

    source: Path
    target: Path
    layout: dict[str, int] = {}  # those of AXES that were given
    format: str | None = None
    dtype: str | None = None
    model: Path | None = None
    device: str = "cpu"
    verify: bool = False
    verify_only: bool = False


def parse(words: Sequence[str]) -> Request:
    """Raises a ValueError of one sentence for a word that is unknown, given twice, impossible, or missing."""
    given = OPTIONS.values(words)
    sizes = {axis: given.pop(axis) for axis in AXES}
    return Request(layout={axis: size for axis, size in sizes.items() if size is not None}, **given)


OPTIONS = Options(
    "convert",
    """Every layout reads a Megatron checkpoint of any other; convert with format=megatron writes it in the shards of
one, so that each of its ranks finds its own part in its own files.
tp*pp ranks start on this machine (with experts, enough for ep*etp*pp): each holds its shard, and up to 1 GiB more
while it writes a checkpoint; the writer of a Hugging Face folder also holds one file (at most 4 GiB).
A folder gets its name when all of it is written.""",
    [
        "megarl convert from=Qwen3-8B to=qwen3_8b_megatron tp=2 pp=2 --verify",
        "megarl convert from=runs/mine/checkpoints/step_00000040/actor to=mine_hf",
        "megarl convert from=qwen3_8b_megatron to=qwen3_8b_tp4 format=megatron tp=4",
    ],
    usage="megarl convert from=FOLDER to=FOLDER [key=value ...] [--verify | --verify-only]",
)
OPTIONS.add_argument(
    "--from",
    dest="source",
    type=folder,
    required=True,
    metavar="FOLDER",
    help="a Hugging Face folder, a folder that convert made, RUN/checkpoints/step_N/actor (or critic), "
    "global_step_N/actor of verl, or a folder of Megatron's dist_checkpointing (with model=)",
)
OPTIONS.add_argument("--to", dest="target", type=folder, required=True, metavar="FOLDER", help="a new folder")
OPTIONS.add_argument("--format", choices=("hf", "megatron"), help="unset = the other one than `from` has")
for axis, about in AXES.items():
    OPTIONS.add_argument(f"--{axis}", type=count, metavar="N", help=about)
OPTIONS.add_argument("--dtype", choices=DTYPES, help="of the tensors; unset = as they are")
OPTIONS.add_argument(
    "--model",
    type=folder,
    metavar="FOLDER",
    help="the Hugging Face folder of a checkpoint's model, where its run's config.yaml does not say it",
)
OPTIONS.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where ranks hold their shards; cpu")
OPTIONS.add_argument(
    "--verify",
    action="store_true",
    help="read both sides again and compare the digest of every tensor before `to` gets its name",
)
OPTIONS.add_argument("--verify-only", action="store_true", help="write nothing: compare two folders that are there")
