"""The benchmark of a whole step: what it reads, its arithmetic, the standard runs, and a whole small run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import bench_ring
import pytest
import ring_dry
from ring_job import gpu_of, make_ring, quickstart_numbers
from ring_model import stop_ids, word_tokenizer, write_model, write_prompts
from ring_report import Peak, between_steps, lost_share, shares_of_peak, stage_rows, tokens_per_second
from ring_suite import suite

from megarl.config import load_config, model_config
from megarl.layout import RANDOM_WEIGHTS
from megarl.plan.time.flops import forward_flops, shape_of
from megarl.weights.hf.load import load_hf

ROOT = Path(__file__).parents[2]


def options(folder: Path, **given: Any) -> Namespace:
    made = bench_ring.parser().parse_args(["--device", "cpu", "--work", str(folder), "--out", str(folder / "out")])
    return Namespace(**(vars(made) | {"steps": 2} | given))


def step(number: int, end: float, **seconds: float) -> dict[str, float]:
    """What a run logs of a step that began where the one before ended."""
    whole = sum(seconds.values()) + 0.1
    return {
        "step": number,
        "time": end,
        "timing_s/step": whole,
        "timing_s/push/send": 0.5,
        **{f"timing_s/{name}": value for name, value in seconds.items()},
        "perf/total_num_tokens": 1000.0,
        "perf/unaccounted": 0.1 / whole,
        "prompt_length/mean": 4.0,
        "response_length/mean": 6.0,
    }


STEPS = [step(2, 10.0, gen=2.0, update_actor=1.0), step(3, 15.1, gen=4.0, update_actor=1.0)]


def test_stages_stand_in_their_order_and_nothing_is_lost() -> None:
    rows = stage_rows(STEPS)
    assert [row["stage"] for row in rows] == ["gen", "update_actor", "unaccounted", "step"]
    assert [row["seconds"] for row in rows] == pytest.approx([3.0, 1.0, 0.1, 4.1])
    assert sum(row["share"] for row in rows[:-1]) == pytest.approx(1)
    assert lost_share(STEPS) == pytest.approx(0.2 / 8.2)
    assert between_steps(STEPS) == pytest.approx(0.0)
    assert tokens_per_second(STEPS) == pytest.approx(2000 / 8.2)


def test_mfu_is_the_arithmetic_of_the_stage_over_what_the_devices_could_do() -> None:
    config, _ = load_config(["recipe=quickstart_grpo"])
    hf = quickstart_numbers()
    forward = forward_flops(shape_of(hf), 1000, 10)
    found = shares_of_peak(config, hf, {}, STEPS, Peak(1e9, 1, ""))
    assert found["mfu"] == pytest.approx(3 * config.actor.ppo_epochs * forward / 1e9)
    assert found["mfu_step"] == pytest.approx(2 * forward * (1 + 3 * config.actor.ppo_epochs) / 8.2 / 1e9)


def test_prompts_have_the_lengths_that_were_asked_for(tmp_path: Path) -> None:
    tokenizer = word_tokenizer(50, 49)
    mean = write_prompts(tmp_path / "prompts.jsonl", 200, mean=12, longest=14, vocab_size=50)
    rows = [json.loads(line)["prompt"] for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    lengths = [len(tokenizer.encode(row)) for row in rows]
    assert mean == sum(lengths) / 200
    assert min(lengths) == 6 and max(lengths) == 14
    assert tokenizer.decode(tokenizer.encode(rows[0])) == rows[0]


def test_completions_end_by_chance_after_the_mean_that_was_asked_for() -> None:
    assert stop_ids(1000, 100.0) == list(range(990, 1000))
    assert stop_ids(1000, None) == [999]
    assert len(stop_ids(10, 1.0)) == 5


def test_a_large_model_is_a_folder_without_weights_that_ranks_leave_as_they_were_made(tmp_path: Path) -> None:
    hf = quickstart_numbers() | {"vocab_size": 300}
    folder = write_model(tmp_path / "model", hf, dtype="bfloat16", weights=False, response_tokens=30.0, seed=7)
    said = json.loads((folder / "config.json").read_text())
    assert said[RANDOM_WEIGHTS] is True and said["architectures"] == ["Qwen3ForCausalLM"]
    assert said["eos_token_id"] == list(range(290, 300))
    assert not list(folder.glob("*.safetensors"))
    with pytest.warns(UserWarning, match="NOTHING IS LOADED"):
        load_hf([], folder, said)  # of anything else it would want weights
    with pytest.raises(ValueError, match="73 billion are too many to make one for"):
        big = model_config(load_config(["recipe=grpo_qwen2_5_72b_8x8h100"])[0], "actor")
        write_model(tmp_path / "big", big, dtype="bfloat16", weights=True, response_tokens=None)


def test_the_run_is_the_recipe_with_everything_made_here(tmp_path: Path) -> None:
    ring = make_ring(["recipe=grpo_qwen2_5_72b_8x8h100", "data.train_batch_size=256"], options(tmp_path))
    config = ring.write_settings()
    given = ring.given
    assert (config.actor, config.rollout.n, config.data.train_batch_size) == (given.actor, 16, 256)
    assert config.model.path == config.ref.model.path == str(tmp_path / "grpo_qwen2_5_72b_8x8h100" / "model")
    assert config.rollout.sglang.args == ["--load-format", "dummy"]
    assert config.trainer.total_training_steps == 4 and config.data.val_files == []
    assert config.trainer.nnodes == 8
    commands = ring.node_commands()
    assert len(commands) == 8
    assert commands[3].endswith("data.train_batch_size=256 trainer.node_rank=3 trainer.master_addr=NODE_0")
    assert ring.launch_command().startswith("bash launch/node.sh 8 NODE NODE_0 recipe=grpo_qwen2_5_72b_8x8h100")


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["recipe=grpo_qwen2_5_72b_8x8h100"], "h100"),
        (["recipe=grpo_deepseek_v3_671b_64x8h200", "layout=512x80"], "h100"),
        (["recipe=grpo_deepseek_v3_671b_64x8h200"], "h200"),
    ],
)
def test_the_gpu_is_that_of_the_layout(tmp_path: Path, words: list[str], name: str) -> None:
    ring = make_ring(words, options(tmp_path))
    assert gpu_of(None, ring).name == name
    assert gpu_of("b200", ring).name == "b200"


def test_without_a_gpu_to_predict_for_it_says_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--gpu is missing, and no layout says it"):
        gpu_of(None, make_ring(["recipe=quickstart"], options(tmp_path)))


def test_every_standard_run_is_one_that_can_be_and_has_published_numbers_beside_it(tmp_path: Path) -> None:
    gpus = {}
    for run in suite("all"):
        own = {"prompt_tokens": run.prompt_tokens, "response_tokens": run.response_tokens}
        ring = make_ring(run.words, options(tmp_path, **own), name=run.name)
        config = ring.write_settings()
        gpus[run.name] = config.trainer.num_ranks
        assert ring.prompt_tokens == run.prompt_tokens <= config.data.max_prompt_length
        assert run.response_tokens <= config.data.max_response_length
        assert any(sentence.startswith("published: ") for sentence in run.anchors)
    assert all(name.endswith(f"_{count}") for name, count in gpus.items())
    with pytest.raises(ValueError, match="--suite absent: expected all, or some of llama3_8b_8,"):
        suite("absent")


def test_a_dry_run_builds_predicts_and_says_what_to_type(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "model=qwen3_0_6b",
        "layout=8x80",
        "recipe=grpo_qwen3_8b_1x8h100",
        "actor.megatron.pipeline_model_parallel_size=2",
    ]
    assert bench_ring.main(["--device", "cpu", "--dry-run", "--json", "--work", str(tmp_path), *words]) == 0
    out = capsys.readouterr().out
    said = json.loads(out.splitlines()[-1])
    assert list(said)[-5:] == list(ring_dry.LAST)
    assert [stage["stage"] for stage in said["ranks"]] == [0, 1]
    assert said["fits"] is True and said["num_gpus"] == 8
    assert said["commands"][0].startswith("node 0: python benchmarks/bench_ring.py") and said["commands"][0] in out


def test_a_run_for_gpus_is_refused_where_there_are_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["recipe=grpo_qwen3_8b_1x8h100", "--device", "cpu", "--work", str(tmp_path)]
    assert bench_ring.main(words) == 2
    assert "it is a run on GPUs, and torch sees none here; expected --dry-run" in capsys.readouterr().err


@pytest.mark.long
def test_the_stages_of_the_quickstart_are_a_whole_step(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks/bench_ring.py"), "--device", "cpu", "--quick", "--json"]
    words = ["data.train_batch_size=8", "rollout.n=2"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [*command, "--work", str(tmp_path / "work"), "--out", str(tmp_path / "out"), *words],
        capture_output=True,
        text=True,
        env=environment,
        timeout=800,
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert list(said)[-1] == "mfu_step"
    stages = {row["stage"]: row["share"] for row in said["rows"]}
    assert {"gen", "ref", "values", "update_critic", "update_actor", "update_weights", "log"} <= set(stages)
    assert sum(share for stage, share in stages.items() if stage != "step") == pytest.approx(1, abs=1e-6)
    assert 0 <= said["unaccounted"] < 1
    is_too_much = said["unaccounted"] > bench_ring.MOST_LOST  # on a loaded machine it may be
    assert any("in no stage" in note for note in said["notes"]) == is_too_much
    assert len(list((tmp_path / "out").iterdir())) == 2
