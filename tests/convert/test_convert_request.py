"""The command line of `megarl convert`, and how its mistakes are told."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megarl import cli
from megarl.convert.request import FLAGS, KEYS, Request, parse


def test_two_folders_are_enough() -> None:
    assert parse(["from=a b", "to=c=d"]) == Request(Path("a b"), Path("c=d"))


def test_every_word_arrives() -> None:
    words = "from=a to=b format=megatron tp=2 ep=4 dtype=bfloat16 model=m device=cuda --verify"
    assert parse(words.split()) == Request(
        Path("a"), Path("b"), "megatron", {"tp": 2, "ep": 4}, "bfloat16", Path("m"), "cuda", verify=True
    )


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("to=b", "megarl convert: from= is missing; expected from=FOLDER to=FOLDER"),
        ("from=a to=", "megarl convert: to= is missing; expected from=FOLDER to=FOLDER"),
        ("from=a to=b tp=0", "tp=0: expected a whole number of at least 1"),
        ("from=a to=b pp=two", "pp=two: expected a whole number of at least 1"),
        ("from=a to=b dtype=float16", "dtype=float16: expected one of float32, bfloat16"),
        ("from=a to=b format=gguf", "format=gguf: expected one of hf, megatron"),
        ("from=a to=b dytpe=float32", "dytpe=float32: there is no key dytpe; did you mean dtype?"),
        ("from=a to=b tp=1 tp=2", "tp=2: tp was given before, as tp=1; expected it once"),
        (
            "a b",
            "a: expected key=value, with a key of from, to, format, tp, pp, ep, etp, vpp, first_stage_layers, "
            "last_stage_layers, dtype, model, device",
        ),
        (
            "from=a to=b --overwrite",
            "there is no option --overwrite; expected --verify, --verify-only, --debug, --help or key=value",
        ),
    ],
)
def test_a_mistake_exits_2_with_one_sentence(words: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["convert", *words.split()]) == 2
    assert capsys.readouterr().err == f"error: {sentence}\n"


def test_help_names_every_key_and_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["convert", "--help"]) == 0
    shown = capsys.readouterr().out
    for word in [*KEYS, *FLAGS]:
        assert word in shown


def test_the_command_line_loads_no_torch() -> None:
    script = "import sys, megarl.convert.request; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
