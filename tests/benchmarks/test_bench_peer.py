"""The comparison with TRL, without TRL: what both sides are told, how their numbers are read, and our own side."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.common import page
from benchmarks.common.page import Result
from benchmarks.peer import bench_peer
from benchmarks.peer.bench_peer import WAYS, Way, megarl_command, pins, ratios, read_megarl, read_trl, run_side
from benchmarks.peer.task import Work, forward_flops
from megarl.config import load_config

WORK = Work("/work", new_tokens=16, iterations=4, warmup=1, threads=2)


def step(end: float, length: float = 16.0) -> dict[str, Any]:
    return {"time": end, "timing_s/step": 0.5, "timing_s/gen": 0.25, "response_length/mean": length}


def test_our_command_is_the_recipe_with_the_works_numbers() -> None:
    for way in (way for way in WAYS if way.side == "megarl"):
        command = megarl_command(WORK, way, "run")
        assert command[1:5] == ["-m", "megarl", "train", "recipe=quickstart_grpo"]
        config, _ = load_config(command[4:], command="train")
        assert config.actor.ppo_mini_batch_size == config.data.train_batch_size == WORK.prompts
        assert (config.rollout.n, config.actor.ppo_epochs) == (WORK.n, WORK.epochs)
        assert (config.model.dtype, config.trainer.device) == ("float32", "cpu")
        assert config.trainer.num_ranks == way.processes
        assert config.data.max_response_length == WORK.new_tokens
        assert config.trainer.total_training_steps == WORK.iterations


def test_our_numbers_are_those_after_warm_up() -> None:
    """By the clock between the ends of steps, as TRL's: what a run does between two steps counts."""
    found = read_megarl(WORK, [{"val/score": 0.5}, step(9.0), step(10.0), step(12.0), step(15.0)])
    assert found["tokens/s"] == 3 * 64 * 8 * 16 / 6.0
    assert (found["iteration_s"], found["gen"], found["ref"]) == (2.0, 0.25, 0.0)


def test_trls_numbers_are_those_after_warm_up() -> None:
    tokens = [WORK.tokens_per_iteration] * 4
    ends = [5.0, 9.0, 9.5, 10.0, 10.5, 11.0, 11.5, 12.0]
    found = read_trl(WORK, {"ends": ends, "tokens": tokens, "versions": pins()})
    assert found == {"tokens/s": 3 * 64 * 8 * 16 / 3.0, "iteration_s": 1.0, "versions": pins()}


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([step(1.0, 15.5)] * 4, "tokens of an answer: a side did 15.5, expected 16"),
        ([step(1.0)] * 3, "iterations: a side did 3, expected 4"),
        ({"ends": [1.0] * 8, "tokens": [8192, 8191]}, "tokens of an iteration: a side did 8191, expected 8192"),
        ({"ends": [1.0] * 4, "tokens": []}, "optimizer steps: a side did 4, expected 8"),
    ],
)
def test_a_side_that_did_other_work_is_no_comparison(rows: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_megarl(WORK, rows) if isinstance(rows, list) else read_trl(WORK, {**rows, "versions": pins()})


def test_the_faster_way_of_each_side_counts() -> None:
    def row(side: str, way: str, rate: float) -> dict[str, Any]:
        return {"side": side, "way": way, "tokens/s": rate, "iteration_s": 100 / rate}

    rows = [row("megarl", "a", 300.0), row("megarl", "b", 50.0), row("trl", "c", 100.0), row("trl", "d", 200.0)]
    rows += [row("megarl", "a", 500.0), row("megarl", "b", 900.0), row("trl", "c", 100.0), row("trl", "d", 200.0)]
    found = ratios(rows, flops=1e9, rate=1e10)
    assert (found["megarl_tokens_per_s"], found["trl_tokens_per_s"]) == (475.0, 200.0)  # b: the median of 50 and 900
    assert found["trl_of_matrix_rate"] == 0.2
    assert found["peer"] == (50 / 200 + 900 / 200) / 2
    assert list(found)[-1] == "peer"


def test_whole_commands_are_compared_by_their_seconds() -> None:
    rows = [
        {"side": "megarl", "way": way, "command_s": s}
        for way, s in (("a", 40.0), ("b", 50.0), ("a", 60.0), ("b", 52.0))
    ]
    rows += [{"side": "trl", "way": "c", "command_s": s} for s in (25.0, 30.0)]
    found = bench_peer.whole_ratios(rows)
    assert (found["megarl_s"], found["trl_s"]) == (50.0, 27.5)
    assert found["peer"] == (25 / 40 + 30 / 60) / 2
    assert bench_peer.whole_ratios(rows[:4]) == {}


@pytest.mark.parametrize("prompt_tokens", [6, 64])
def test_prompts_are_as_long_as_the_work_says_and_the_model_cannot_write_its_end(
    prompt_tokens: int, tmp_path: Path
) -> None:
    work = Work(str(tmp_path), new_tokens=4, iterations=2, warmup=1, threads=2, prompt_tokens=prompt_tokens)
    work.write()
    prompts = [json.loads(line)["prompt"] for line in Path(work.data).read_text().splitlines()]
    assert {len(prompt) for prompt in prompts} == {prompt_tokens}
    assert len(set(prompts)) > work.prompts * work.iterations
    config = json.loads(Path(work.model, "config.json").read_text())
    assert config["eos_token_id"] >= config["vocab_size"]
    once, prompt = forward_flops(config, prompt_tokens + 4, 4), forward_flops(config, prompt_tokens, 0)
    assert work.flops() == pytest.approx(512 * once * 9 - 448 * prompt)
    assert f"data.max_prompt_length={prompt_tokens}" in megarl_command(work, WAYS[0], "run")


def test_the_arithmetic_of_a_sequence() -> None:
    config = {"hidden_size": 4, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 2}
    config |= {"intermediate_size": 8, "num_hidden_layers": 3, "vocab_size": 10}
    matrices = 4 * 2 * 2 * 3 + 3 * 4 * 8  # q, o, k, v; gate, up, down
    attention = 4 * 2 * 2 * (1 + 2 + 3)
    assert forward_flops(config, 3, 2) == 3 * (2 * matrices * 3 + attention) + 2 * 4 * 10 * 2


def test_a_way_that_dies_is_reported_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL's second way is a process that aborts; the others write what they would, at 100 tokens a second."""
    work = Work(str(tmp_path), new_tokens=16, iterations=2, warmup=1, threads=2)
    ways = [Way("megarl", 1, words="one"), Way("trl", 1, words="one"), Way("trl", 2, words="two")]
    done: list[str] = []

    def stand_in(work: Work, way: Way, python: Path, name: str) -> dict[str, Any]:
        done.append(f"{way.side} {way.words}")
        if way == ways[2]:
            bench_peer.execute([str(python), "-c", "import os; os.abort()"], tmp_path / "log", {})
        return {"tokens/s": 100.0, "iteration_s": 1.0}

    monkeypatch.setattr(bench_peer, "run_side", stand_in)
    rows, _ = bench_peer.measure(work, ways, Path(sys.executable), rounds=2)
    assert done == ["megarl one", "trl one", "trl two", "trl one", "megarl one"], "it is not run again"
    (failed,) = (row for row in rows if "failed" in row)
    assert (failed["round"], failed["side"], failed["way"]) == (1, "trl", "two")
    assert "ended by SIGABRT" in failed["failed"]
    assert ratios(rows, flops=1e9, rate=1e10)["peer"] == 1.0
    assert "SIGABRT" in page.markdown(Result("peer", "cpu", {}, rows), page.numbers(Result("peer", "cpu", {}, rows)))
    assert ratios([row for row in rows if row["way"] != "one" or row["side"] != "trl"], flops=1e9, rate=1e10) == {}
    late = {"side": "trl", "way": "late", "iteration_s": 0.1}
    more = [*rows, late | {"tokens/s": 900.0}, late | {"failed": "why"}]
    assert ratios(more, flops=1e9, rate=1e10)["trl_tokens_per_s"] == 100.0, "a way that failed once does not count"


def test_the_environment_is_what_the_pins_say() -> None:
    bench_peer.check_pins(pins() | {"torch": f"{pins()['torch']}+cpu"})
    with pytest.raises(ValueError, match=r"TRL's environment has trl 0.9, expected [\d.]+ of peer.txt; make it anew"):
        bench_peer.check_pins(pins() | {"trl": "0.9"})
    assert {"trl", "torch", "transformers"} <= set(pins())
    constraints = (bench_peer.ROOT / "launch" / "constraints.txt").read_text().splitlines()
    shared = {
        name: version for name, version in pins().items() if any(line.startswith(f"{name}==") for line in constraints)
    }
    assert {"torch", "transformers", "datasets"} <= set(shared)
    assert all(f"{name}=={version}" in constraints for name, version in shared.items())
    torch_first, rest = bench_peer.install_commands(Path("/trl/bin/python"))
    assert torch_first[-1] == "torch"
    assert rest[-1] == str(bench_peer.PINS)


def test_trl_is_told_all_of_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the process: it writes what trl_side.py would."""
    work = Work(str(tmp_path), new_tokens=16, iterations=2, warmup=1, threads=2)
    told: dict[str, Any] = {}

    def stand_in(command: list[str], log: Path, variables: dict[str, str]) -> None:
        told.update(json.loads(Path(command[-1]).read_text()) | variables)
        said = {"ends": [1.0, 2.0, 3.0, 4.0], "tokens": [8192, 8192], "versions": pins()}
        Path(told["out"]).write_text(json.dumps(said))

    monkeypatch.setattr(bench_peer, "execute", stand_in)
    assert run_side(work, Way("trl", 2), Path("python"), "it")["tokens/s"] == 8192 / 2
    assert (told["OMP_NUM_THREADS"], told["threads"]) == ("1", 1)
    assert told.items() >= {"model": work.model, "data": work.data, "prompts": 64, "epochs": 2, "lr": 3e-4}.items()
    assert set(asdict(work)) <= set(told)


# ---- pairs


@pytest.mark.full
def test_differences_from_trl_are_relative_and_one_above_the_limit_ends_with_exit_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks.peer import bench_pairs  # with Megatron, which no other test here needs

    large, small = torch.tensor([4.0, 1.0]), torch.tensor([[0.01]])
    theirs = (0.5, {"large": large, "small": small})
    found = bench_pairs.differences((0.6, {"large": large, "small": small.view(1) + 0.002}), theirs)
    assert found == {"of the loss": pytest.approx(0.2), "of the gradient": pytest.approx(0.002 / 0.04, rel=1e-4)}
    with pytest.raises(ValueError, match=r"gradients of other tensors: \['large'\]"):
        bench_pairs.differences((0.6, {"small": small}), theirs)
    of_all = dict.fromkeys(bench_pairs.NAMES, theirs)
    versions: dict[str, str] = {}
    monkeypatch.setattr(bench_pairs, "trl_python", lambda: Path("python"))
    monkeypatch.setattr(bench_pairs, "trl_side", lambda *_: (of_all, versions))
    for ours, code in ((theirs, 0), ((0.5001, theirs[1]), 1)):
        monkeypatch.setattr(bench_pairs, "our_side", lambda *_, ours=ours: dict.fromkeys(bench_pairs.NAMES, ours))
        words = ["--device", "cpu", "--out", str(tmp_path)]
        assert page.run(bench_pairs.work, page.arguments(None), words) == code
    assert len(list(tmp_path.glob("pairs_*.md"))) == 2, "a result that failed is written down, too"
