"""The command line of `megarl convert`: key=value words, as for every command, and two flags."""

from __future__ import annotations

from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

FORMATS = ("hf", "megatron")
DTYPES = ("float32", "bfloat16")
DEVICES = ("cpu", "cuda")
AXES = ("tp", "pp", "vpp", "first_stage_layers", "last_stage_layers", "ep", "etp")

KEYS = {
    "from": "a Hugging Face folder, a folder that convert made, RUN/checkpoints/step_N/actor (or critic), "
    "global_step_N/actor of verl, or a folder of Megatron's dist_checkpointing (with model=)",
    "to": "a new folder",
    "format": "hf | megatron: what to write; unset = the other one than `from` has",
    "tp pp ep etp": "ranks of the layout: tensor, pipeline, experts, tensor in an expert; unset = 1, etp as tp",
    "vpp": "interleaved stages of each pipeline rank; unset = 1",
    "first_stage_layers last_stage_layers": "layers of the first and the last pipeline rank; unset = as the others",
    "dtype": "float32 | bfloat16 of the tensors; unset = as they are",
    "model": "the Hugging Face folder of a checkpoint's model, where its run's config.yaml does not say it",
    "device": "cpu | cuda, where ranks hold their shards; unset = cpu",
}
FLAGS = {
    "--verify": "read both sides again and compare the digest of every tensor before `to` gets its name",
    "--verify-only": "write nothing: compare two folders that are there",
}
EXAMPLES = (
    "megarl convert from=Qwen3-8B to=qwen3_8b_megatron tp=2 pp=2 --verify",
    "megarl convert from=runs/mine/checkpoints/step_00000040/actor to=mine_hf",
    "megarl convert from=qwen3_8b_megatron to=qwen3_8b_tp4 format=megatron tp=4",
)
ABOUT = (
    "Every layout reads a Megatron checkpoint of any other; convert with format=megatron writes it in the shards of "
    "one, so that each of its ranks finds its own part in its own files.",
    "tp*pp ranks start on this machine (with experts, enough for ep*etp*pp): each holds its shard, and up to "
    "1 GiB more while it writes a checkpoint; the writer of a Hugging Face folder also holds one file (at most 4 GiB).",
    "A folder gets its name when all of it is written.",
)


@dataclass(frozen=True)
class Request:
    """The parsed command line.  Example: Request(Path("m"), Path("out"), layout={"tp": 2})."""

    source: Path
    target: Path
    format: str | None = None
    layout: dict[str, int] = field(default_factory=dict)  # those of AXES that were given
    dtype: str | None = None
    model: Path | None = None
    device: str = "cpu"
    verify: bool = False
    verify_only: bool = False


def parse(words: list[str]) -> Request:
    """Raises a ValueError of one sentence for a word that is unknown, given twice, impossible, or missing."""
    flags = {word for word in words if word.startswith("-")}
    if unknown := sorted(flags - FLAGS.keys()):
        raise ValueError(f"there is no option {unknown[0]}; expected {', '.join(FLAGS)}, --debug, --help or key=value")
    given = _settings([word for word in words if word not in flags])
    for key in ("from", "to"):
        if not given.get(key):
            raise ValueError(f"megarl convert: {key}= is missing; expected from=FOLDER to=FOLDER")
    return Request(
        source=Path(given["from"]),
        target=Path(given["to"]),
        format=_one_of("format", given.get("format"), FORMATS),
        layout={axis: _size(axis, given[axis]) for axis in AXES if axis in given},
        dtype=_one_of("dtype", given.get("dtype"), DTYPES),
        model=Path(given["model"]) if "model" in given else None,
        device=_one_of("device", given.get("device"), DEVICES) or "cpu",
        verify="--verify" in flags,
        verify_only="--verify-only" in flags,
    )


def print_help(console: Console) -> None:
    """Print the page of `megarl convert --help`."""
    console.print("[bold]megarl convert[/] from=FOLDER to=FOLDER \\[key=value ...] \\[--verify]\n", highlight=False)
    table = Table(show_header=False, box=None, padding=(0, 2))
    for name, about in [*KEYS.items(), *FLAGS.items()]:
        table.add_row(f"[cyan]{escape(name)}[/]", escape(about))
    console.print(table)
    console.print("", *ABOUT, "", sep="\n", highlight=False)
    for example in EXAMPLES:
        console.print(f"  [cyan]{escape(example)}[/]", highlight=False, soft_wrap=True)


def _settings(words: list[str]) -> dict[str, str]:
    known = [name for names in KEYS for name in names.split()]
    given: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            raise ValueError(f"{word}: expected key=value, with a key of {', '.join(known)}")
        if key not in known:
            guess = get_close_matches(key, known, n=1)
            meant = f"did you mean {guess[0]}?" if guess else f"expected one of {', '.join(known)}"
            raise ValueError(f"{word}: there is no key {key}; {meant}")
        if key in given:
            raise ValueError(f"{word}: {key} was given before, as {key}={given[key]}; expected it once")
        given[key] = value
    return given


def _one_of(key: str, value: str | None, known: tuple[str, ...]) -> str | None:
    if value is not None and value not in known:
        raise ValueError(f"{key}={value}: expected one of {', '.join(known)}")
    return value


def _size(axis: str, value: str) -> int:
    if not value.isdecimal() or int(value) < 1:
        raise ValueError(f"{axis}={value}: expected a whole number of at least 1")
    return int(value)
