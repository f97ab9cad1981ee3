"""The benchmark of the rollout client: its work, its turns, what it refuses, and a whole small run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from argparse import Namespace
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

import bench_rollout
import pytest
from bench_rollout import QUICK, SIZES, Timed, parser, ratio, sized, take_turns
from page import run
from rollout_clients import NUM_LENGTHS, Request, lengths, requests

ROOT = Path(__file__).parents[2]


def test_lengths_have_the_mean_that_was_asked_for_and_spread_around_it() -> None:
    assert lengths(5, 7, 0.0) == [7] * 5
    found = lengths(10 * NUM_LENGTHS, 1000, 0.5)
    assert abs(sum(found) / len(found) - 1000) < 1
    assert len(set(found)) == NUM_LENGTHS and max(found) > 2 * min(found)
    assert sum(lengths(4, 100, 0.5)) == 400, "of few requests, too"
    assert min(lengths(NUM_LENGTHS, 1, 2.0)) == 1, "a completion has a token"


def test_an_engine_has_its_usual_sizes_where_none_are_given() -> None:
    plain = parser().parse_args(["--device", "cpu", "--turns", "2"])
    assert (sized(plain, "hf").prompts, sized(plain, "hf").turns) == (SIZES["cpu"]["prompts"], 2)
    assert sized(plain, "sglang").prompts == SIZES["sglang on cpu"]["prompts"] < sized(plain, "instant").prompts
    on_gpu = parser().parse_args(["--device", "cuda"])
    assert sized(on_gpu, "sglang").new_tokens == SIZES["cuda"]["new_tokens"]
    assert sized(on_gpu, "hf").prompts < SIZES["cuda"]["prompts"], "the hf engine is no fast one on a GPU either"
    quick = sized(parser().parse_args(["--device", "cpu", "--quick", "--n", "3"]), "sglang")
    assert (quick.n, quick.new_tokens) == (3, QUICK["new_tokens"])


def test_on_a_gpu_the_cache_of_the_hf_engine_holds_what_is_under_way(tmp_path: Path) -> None:
    on_gpu = bench_rollout.sized(parser().parse_args(["--device", "cuda"]), "hf")
    launch = bench_rollout.launch_of("hf", tmp_path, on_gpu)
    assert (launch.memory_fraction, launch.gpu) == (bench_rollout.HF_SHARE, 0)
    model = bench_rollout.GPU_MODEL
    bytes_per_token = 2 * model["layers"] * model["kv_heads"] * model["head_dim"] * 2  # keys and values, bfloat16
    asked = on_gpu.prompts * on_gpu.n * (on_gpu.prompt_tokens + on_gpu.new_tokens)
    assert 2 * asked * bytes_per_token < launch.memory_fraction * 40e9
    assert bench_rollout.launch_of("sglang", tmp_path, on_gpu).memory_fraction is None, "it takes most of a GPU itself"
    on_cpu = bench_rollout.sized(parser().parse_args(["--device", "cpu"]), "hf")
    assert bench_rollout.launch_of("hf", tmp_path, on_cpu).memory_fraction is None


def test_requests_are_the_same_each_time_and_their_lengths_stand_together() -> None:
    how = {"prompt_tokens": 5, "new_tokens": 20, "spread": 0.5, "vocabulary": 50}
    found = requests(24, 4, **how)
    assert found == requests(24, 4, **how) and found != requests(24, 4, **how, seed=1)
    assert sorted(r.new_tokens for r in found) == sorted(lengths(24, 20, 0.5))
    assert len(list(groupby(found, key=lambda r: r.new_tokens))) == NUM_LENGTHS
    assert all(len(r.prompt.token_ids) == 5 and max(r.prompt.token_ids) < 50 for r in found)
    assert found[0].params.ignore_eos and found[0].params.max_new_tokens == found[0].new_tokens


class Noting:
    """Says when it is asked."""

    pid = os.getpid()

    def __init__(self, name: str, heard: list[str]) -> None:
        self.name, self.heard = name, heard

    def ready(self, work: Sequence[Request]) -> None:
        self.heard.append(f"{self.name} ready")

    def ask(self, work: Sequence[Request]) -> int:
        self.heard.append(self.name)
        return 10


def test_clients_take_turns_and_the_first_does_not_count() -> None:
    heard: list[str] = []
    found = take_turns([Noting("ring", heard), Noting("bare", heard)], [], 2, lambda: heard.append("-"))
    order = ["ring", "bare", "bare", "ring", "ring", "bare"]
    assert heard == ["ring ready", "bare ready", *(word for name in order for word in ("-", name))]
    for timed in found:
        assert timed.tokens == 10 and len(timed.seconds) == len(timed.cpu_s) == 2


def test_the_ratio_is_the_median_of_the_turns() -> None:
    ring, bare = Timed(100, [1.0, 2.0, 4.0], [0.1] * 3), Timed(100, [1.0, 1.0, 3.0], [0.05] * 3)
    assert ratio(ring, bare) == 0.75
    row = ring.row("hf", "ring")
    assert (row["tokens/s"], row["slowest"], row["fastest"], row["client CPU us/token"]) == (50, 25, 100, 1000)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--engines", "sglang"), "--engines sglang: expected one that is here; sglang: not measured"),
        (("--engines", "instant"), "--engines instant: expected one that is here"),
        (("--engines", "hf", "--new-tokens", "4096"), "--new-tokens 4096: the longest completion has"),
        (("--model", "/nowhere"), "--model /nowhere: expected a folder with a Hugging Face config.json"),
    ],
)
def test_what_cannot_be_measured_is_one_sentence(
    words: Sequence[str],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("MEGARL_SGLANG_PYTHON", str(tmp_path / "python"))
    common = ["--device", "cpu", "--out", str(tmp_path / "out")]
    assert run(bench_rollout.work, bench_rollout.parser(), [*common, *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {sentence}") and error.count("\n") == 1
    assert not list((tmp_path / "out").iterdir())


def test_a_server_that_ends_is_noticed_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = Namespace(start=lambda: None, kill=lambda: None, join=lambda: None, exitcode=7)
    context = Namespace(Process=lambda **_: ended)
    monkeypatch.setattr(bench_rollout.multiprocessing, "get_context", lambda _: context)
    options = bench_rollout.parser().parse_args([])
    with (
        pytest.raises(bench_rollout.ServerDied, match="the server has ended with exit code 7"),
        bench_rollout.serving("instant", tmp_path, "", options, tmp_path),
    ):
        pass


@pytest.mark.long
@pytest.mark.dist
def test_a_whole_run_prints_its_ratio_last(tmp_path: Path) -> None:
    words = ["--device", "cpu", "--quick", "--engines", "hf", "instant", "--json", "--out", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "benchmarks/bench_rollout.py", *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert list(said)[-2:] == ["ring_over_bare_hf", "ring_over_bare"] and said["ring_over_bare"] > 0
    assert [(row["engine"], row["client"]) for row in said["rows"]] == [
        ("hf", "ring"),
        ("hf", "bare"),
        ("instant", "ring"),
        ("instant", "bare"),
    ]
    assert len({row["tokens"] for row in said["rows"]}) == 1
    assert sorted(file.suffix for file in tmp_path.iterdir()) == [".json", ".md"]
