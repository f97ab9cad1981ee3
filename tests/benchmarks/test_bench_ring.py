"""The benchmark of a whole step: what it reads, its arithmetic, and the standard runs."""

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.ring import bench_ring, dry_run
from benchmarks.ring.job import make_ring, quickstart_numbers
from benchmarks.ring.model import write_model
from benchmarks.ring.report import Peak, between_steps, lost_share, shares_of_peak, stage_rows, tokens_per_second
from benchmarks.ring.suite import suite
from megarl.arch.layout import RANDOM_WEIGHTS
from megarl.config import load_config, model_config
from megarl.weights.count import forward_flops, shape_of
from megarl.weights.hf.load import load_hf


def options(folder: Path, **given: Any) -> Namespace:
    made = bench_ring.parser().parse_args(["--device", "cpu", "--work", str(folder), "--out", str(folder / "out")])
    return Namespace(**(vars(made) | {"steps": 2} | given))


def step(number: int, end: float, **seconds: float) -> dict[str, float]:
    """What a run logs of a step that began where the one before ended."""
    whole = sum(seconds.values()) + 0.1
    stages = {f"timing_s/{name}": value for name, value in {"push/send": 0.5, "step": whole, **seconds}.items()}
    lengths = {"perf/total_num_tokens": 1000.0, "prompt_length/mean": 4.0, "response_length/mean": 6.0}
    return {"step": number, "time": end, "perf/unaccounted": 0.1 / whole, **stages, **lengths}


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


def test_every_standard_run_is_one_that_can_be_and_has_published_numbers_beside_it(tmp_path: Path) -> None:
    for run in suite("all"):
        own = {"prompt_tokens": run.prompt_tokens, "response_tokens": run.response_tokens}
        config = make_ring(run.words, options(tmp_path, **own), name=run.name).write_settings()
        assert run.name.endswith(f"_{config.trainer.num_ranks}")
        assert run.prompt_tokens <= config.data.max_prompt_length
        assert run.response_tokens <= config.data.max_response_length
        assert any(sentence.startswith("published: ") for sentence in run.anchors)
    with pytest.raises(ValueError, match="--suite absent: expected all, or some of llama3_8b_8,"):
        suite("absent")


def test_a_dry_run_builds_predicts_and_says_what_to_type(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["model=qwen3_0_6b", "layout=8x80", "recipe=grpo_qwen3_8b_1x8h100"]
    words += ["actor.megatron.pipeline_model_parallel_size=2"]
    assert bench_ring.main(["--device", "cpu", "--dry-run", "--json", "--work", str(tmp_path), *words]) == 0
    out = capsys.readouterr().out
    said = json.loads(out.splitlines()[-1])
    assert list(said)[-5:] == list(dry_run.LAST)
    assert [stage["stage"] for stage in said["ranks"]] == [0, 1]
    assert said["fits"] is True and said["num_gpus"] == 8
    assert said["commands"][0].startswith("node 0: python benchmarks/ring/bench_ring.py") and said["commands"][0] in out
