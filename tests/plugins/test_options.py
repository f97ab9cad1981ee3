"""The words of the commands that take no configuration, and how their mistakes are told."""

from pathlib import Path

import pytest

from megarl import cli
from megarl.commands import checkpoint, new
from megarl.commands.convert import request as convert
from megarl.commands.doctor import command as doctor
from megarl.commands.plan import command as plan
from megarl.commands.plan.command import Request as PlanRequest
from megarl.commands.watch import command as watch
from megarl.metrics.report import page as report
from megarl.plugins.options import Options


def test_every_word_arrives() -> None:
    assert new.parse(["mine", "--task", "sorting"]) == new.Request(Path("mine"), "sorting")
    assert watch.parse(["run", "--every=0.5", "--once"]) == watch.Request(Path("run"), 0.5, True)
    assert report.parse(["b", "--against", "a", "c", "against=d"]) == report.Request(Path("b"), list(map(Path, "acd")))
    pruned = checkpoint.parse(["prune", "run", "keep=1", "--best=0", "--dry-run"])
    assert pruned == checkpoint.Request("prune", Path("run"), {"newest": 1, "best": 0}, True)
    assert convert.parse(["from=a b", "to=c=d"]) == convert.Request(Path("a b"), Path("c=d"))
    words = "from=a to=b format=megatron tp=2 --ep=4 dtype=bfloat16 --model m device=cuda --verify"
    sizes = {"tp": 2, "ep": 4}
    wanted = convert.Request(Path("a"), Path("b"), sizes, "megatron", "bfloat16", Path("m"), "cuda", verify=True)
    assert convert.parse(words.split()) == wanted


def test_options_stand_anywhere_between_settings() -> None:
    request = plan.parse(["a=1", "--gpu", "h200", "--gpus=16", "--search", "b=2", "--config", "mine.yaml"])
    settings = ["a=1", "b=2", "recipe='mine.yaml'"]
    assert request == PlanRequest(gpu="h200", gpus=16, search=True, settings=settings)
    machine = doctor.parse(["rollout.engine=sglang", "--json", "--peer", "[fd00::1]:29400"])
    assert machine.json and str(machine.peer) == "[fd00::1]:29400" and machine.settings == ["rollout.engine=sglang"]
    assert doctor.parse(["--peer=node1:29400"]).peer == ("node1", 29400)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("new mine", ["--task", "expected megarl new"]),
        ("new mine --task sort", ["sort", *new.TASKS]),
        ("new a b --task sorting", ["b", "expected megarl new"]),
        ("new mine --tasks sorting", ["--task"]),
        ("watch", ["run", "expected megarl watch"]),
        ("watch a --every 0", ["--every", "0", "expected a number above 0"]),
        ("watch a --fast", ["--fast", "--once"]),
        ("report a b", ["b", "expected megarl report"]),
        ("report a --against", ["--against", "expected at least one argument"]),
        ("checkpoint verify", ["folder", "verify|list|prune FOLDER"]),
        ("checkpoint look x", ["look", "verify|list|prune"]),
        ("checkpoint verify x keep=1", ["verify", "keep=", "prune"]),
        ("checkpoint prune x keep=0", ["--keep", "0", "expected a whole number of at least 1"]),
        ("checkpoint prune x best=-1", ["--best", "-1", "expected a whole number"]),
        ("checkpoint prune x kept=1", ["kept=1", "[keep=N]"]),
        ("convert to=b", ["--from", "from=FOLDER"]),
        ("convert from=a to=", ["--to", "expected a folder"]),
        ("convert from=a to=b pp=two", ["--pp", "two", "expected a whole number of at least 1"]),
        ("convert from=a to=b dtype=float16", ["--dtype", "float16", *convert.DTYPES]),
        ("convert from=a to=b dytpe=float32", ["dytpe=float32"]),
        ("convert from=a to=b tp=1 tp=2", ["tp=2", "tp=1"]),
        ("plan --gpus many", ["--gpus", "many", "expected a whole number of at least 1"]),
        ("plan --gpu", ["--gpu", "expected one argument"]),
        ("plan --response-tokens -3", ["--response-tokens", "-3", "expected a number above 0"]),
        ("plan --nic inf", ["--nic", "inf", "expected a number above 0"]),
        ("plan --fast", ["--fast", "[--option ...]"]),
        ("doctor --run", ["--run", "expected one argument"]),
        ("doctor --run runs/a rollout.n=2", ["--run", "rollout.n=2"]),
        ("doctor --listen 10.0.0.1:29400 --json", ["--listen", "--json"]),
        ("doctor --jason", ["--jason", "--json"]),
        *((f"doctor --peer={place}", ["--peer", f"{place}: expected ADDRESS:PORT"]) for place in ("10.0.0.1", ":80")),
        *((f"doctor --peer={place}", ["--peer", place]) for place in ("a@10.0.0.1:80", "1.2.3.4:99999", "a..b:80")),
    ],
)
def test_a_mistake_is_one_sentence_that_names_it_and_what_is_expected(
    words: str, named: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words.split()) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: megarl {words.split()[0]}: ") and said.count("\n") == 1
    assert "expected " in said
    assert not [word for word in named if word not in said], said


@pytest.mark.parametrize("options", [module.OPTIONS for module in (new, watch, report, checkpoint, convert, plan)])
def test_the_page_of_a_command_has_its_options_and_examples(options: Options) -> None:
    page = options.format_help()
    assert "usage: megarl " in page and "\nmegarl " in page
    assert not [action.dest for action in options._actions if (action.option_strings or [action.dest])[0] not in page]
