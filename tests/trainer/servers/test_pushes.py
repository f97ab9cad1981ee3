"""What a run tells its pushes: about quantized servers, and about running requests."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from megarl.config import Config, load_config
from megarl.trainer.servers.pushes import CANARY_TOLERANCE, canary, export_folder, push_settings

MODEL = ("model.path=x", "data.train_files=y", "model.dtype=bfloat16", "rollout.engine=sglang")
FP8 = ("rollout.quantization=fp8", "algorithm.rollout_correction.level=token")
TWO = ("trainer.nnodes=2", "trainer.master_addr=a")


def config_of(*words: str) -> Config:
    return load_config([*MODEL, *words])[0]


@pytest.mark.parametrize(("words", "kind"), [((), "bfloat16"), (FP8, "fp8")])
def test_the_canary_of_quantized_servers_has_a_wider_limit(words: tuple[str, ...], kind: str) -> None:
    actor = SimpleNamespace(log_probs=lambda batch, temperature, inputs: torch.zeros(len(batch.tokens)))
    found = canary(config_of(*words), cast(Any, actor), [5, 6, 7])
    assert (found["tolerance"], found["log_probs"]) == (CANARY_TOLERANCE[kind], [0.0, 0.0])
    assert CANARY_TOLERANCE["bfloat16"] < CANARY_TOLERANCE["fp8"] < 1


def test_quantized_servers_on_other_machines_read_the_check_in_the_runs_folder() -> None:
    for words, is_there in (((), False), (FP8, False), (TWO, False), ((*FP8, *TWO), True)):
        config = config_of(*words)
        assert export_folder(config) == (str(config.trainer.run_dir / "push_check") if is_there else None)


@pytest.mark.parametrize(
    ("words", "mode"),
    [
        ((), "retract"),
        (("rollout.ahead=2",), "in_place"),
        (("rollout.ahead=2", "rollout.update=retract"), "retract"),
        (("actor.router_replay=rollout",), "abort"),
        (("actor.router_replay=rollout", "rollout.ahead=2", "rollout.update=retract"), "abort"),
        (("actor.router_replay=rollout", "rollout.ahead=2"), "in_place"),
        (("actor.router_replay=old",), "retract"),
    ],
)
def test_a_push_loses_no_experts_of_tokens_that_are_written(words: tuple[str, ...], mode: str) -> None:
    """A request that is retracted in a push would report those of the pass that computes its KV again."""
    assert push_settings(config_of(*words), ["http://127.0.0.1:5"], "").pause_mode == mode
