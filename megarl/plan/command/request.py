"""The options of `megarl plan`; all other words are settings as in `megarl train`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

OPTIONS = {
    "--gpu NAME": "a100 h100 h800 h200 h20 b200 gb200; unset = what the layout's name means (64x80: h100)",
    "--gpus N": "of the whole run, servers' own among them; unset = as configured",
    "--gpus-per-node N": "of a machine; unset = as configured",
    "--nic GBIT": "Gbit/s of one GPU to other machines; unset = as the data sheet has it",
    "--link GB": "GB/s of one GPU to others of its machine, one direction; unset = the same",
    "--host GB": "GB of host memory of a machine; unset = predicted, but not compared",
    "--prompt-tokens MEAN": "length of a prompt; unset = a quarter of data.max_prompt_length",
    "--response-tokens MEAN": "length of a completion; unset = half of data.max_response_length",
    "--search": "look for better layouts, and say why they are better",
    "--json": "one JSON object in place of tables",
}
EXAMPLES = (
    "megarl plan recipe=grpo_qwen2_5_72b_8x8h100",
    "megarl plan recipe=grpo_qwen2_5_72b_8x8h100 --gpu h200 --gpus 128 --search",
    "megarl plan model=qwen3_8b layout=8x80 --response-tokens 3000 --json",
)
ABOUT = (
    "All of it is predicted, from the model's numbers, data sheets of GPUs, and",
    "constants fitted on published measurements (benchmarks/results has the table",
    "of errors).  Nothing is started, and no GPU is asked.",
)


@dataclass(frozen=True)
class Request:
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


def parse(words: list[str]) -> tuple[Request, list[str]]:
    """The options among these words, and the other words.  Raises: ValueError of one sentence."""
    values: dict[str, Any] = {}
    others: list[str] = []
    rest = iter(words)
    for word in rest:
        option, equals, value = word.partition("=")
        name = option[2:].replace("-", "_")
        if option in _FLAGS and not equals:
            values[name] = True
        elif option in _VALUES:
            text = value if equals else next(rest, "")
            values[name] = _VALUES[option](option, text)
        else:
            others.append(word)
    return Request(**values), others


def print_help(console: Console) -> None:
    """The page that `megarl plan --help` shows."""
    console.print("[bold]megarl plan[/] recipe=NAME | model=NAME layout=NAME \\[key=value ...]\n", highlight=False)
    table = Table(show_header=False, box=None, padding=(0, 2))
    for name, about in OPTIONS.items():
        table.add_row(f"[cyan]{escape(name)}[/]", escape(about))
    console.print(table)
    console.print("", *ABOUT, "", sep="\n", highlight=False)
    for example in EXAMPLES:
        console.print(f"  [cyan]{escape(example)}[/]", highlight=False, soft_wrap=True)


def _text(option: str, text: str) -> str:
    if not text:
        raise ValueError(f"{option}: expected a value behind it, as in {option} h100")
    return text


def _count(option: str, text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{option} {text}: expected a whole number of at least 1")
    return int(text)


def _above_0(of: str) -> Callable[[str, str], float]:
    def parsed(option: str, text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = 0.0
        if not 0 < value < float("inf"):
            raise ValueError(f"{option} {text}: expected a number of {of} above 0")
        return value

    return parsed


_FLAGS = ("--search", "--json")
_VALUES: dict[str, Callable[[str, str], Any]] = {
    "--gpu": _text,
    "--gpus": _count,
    "--gpus-per-node": _count,
    "--nic": _above_0("Gbit/s"),
    "--link": _above_0("GB/s"),
    "--host": _above_0("GB"),
    "--prompt-tokens": _above_0("tokens"),
    "--response-tokens": _above_0("tokens"),
}
