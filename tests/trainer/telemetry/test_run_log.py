"""Numbers of a step under verl's names: utilization, times per token, the epoch."""

import pytest
import torch

from megarl.config import Config, load_config
from megarl.samples.batch import Batch
from megarl.trainer.telemetry.run_log import StepMetrics

MODEL = (
    "model.config={model_type:qwen3,vocab_size:1024,hidden_size:64,intermediate_size:128,num_hidden_layers:2,"
    "num_attention_heads:4,num_key_value_heads:2,head_dim:16,tie_word_embeddings:false}"
)


def config_of(*words: str) -> Config:
    base = ["data.train_files=[a]", "model.path=m", MODEL, "data.train_batch_size=4", "rollout.n=2"]
    return load_config([*base, "actor.ppo_mini_batch_size=4", *words])[0]


def batch_of(*lengths: int) -> Batch:
    """The policy generated the last two tokens."""
    mask = torch.zeros(sum(lengths))
    mask[-2:] = 1
    return Batch(torch.zeros(sum(lengths), dtype=torch.int64), torch.tensor(lengths), {"response_mask": mask})


def test_utilization_is_the_models_flops_over_those_of_the_data_sheet() -> None:
    """Per token two operations for each of 115,072 parameters, and the attention, in each of three passes.

    A layer: q and o 64 * 64 each, k and v 64 * 32 each, three of 64 * 128, norms 2 * 64 and of heads 2 * 16; the head
    has 64 * 1024.  Attention: 4 operations for each of 4 * 16 numbers of a head and half of the keys.
    """
    layer = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64 + 2 * 16
    per_token = 2 * (2 * layer + 64 * 1024)
    of_keys = 2 * 4 * 4 * 16 * (100**2 + 50**2) / 2
    flops = 150 * per_token + of_keys
    found = StepMetrics(config_of("algorithm.adv_estimator=grpo"), 10, {"actor": "NVIDIA H100 80GB HBM3"})
    times = {
        "timing_s/gen": 0.5,
        "timing_s/update_actor": 2.0,
        "timing_s/old_log_prob": 0.5,
        "perf/old_log_prob_share": 0.75,
    }
    out = found(6, batch_of(100, 50), times)
    assert out["perf/mfu/actor"] == pytest.approx(3 * flops / 2.0 / 989.4e12)
    assert out["perf/mfu/actor_infer"] == pytest.approx(0.75 * flops / 0.5 / 989.4e12)
    assert out["timing_per_token_ms/update_actor"] == pytest.approx(2000 / 150)
    assert out["timing_per_token_ms/gen"] == pytest.approx(500 / 2), "of what the policy generated"
    assert (out["training/global_step"], out["training/epoch"]) == (6, 2), "5 steps of 4 are two epochs of 10"
    shared = found(6, batch_of(100, 50), {**times, "actor/computed_share": 0.5})
    assert shared["perf/mfu/actor"] == pytest.approx(out["perf/mfu/actor"] / 2), "what is computed once counts once"
    assert "perf/mfu/critic" not in out and "timing_per_token_ms/values" not in out
    assert out["perf/cpu_memory_used_gb"] > 0


def test_adapters_need_no_gradient_of_the_model_and_epochs_count() -> None:
    batch, times = batch_of(8, 8), {"timing_s/update_actor": 1.0}
    plain, adapted, twice = (
        StepMetrics(config_of("algorithm.adv_estimator=grpo", *words), 10, {"actor": "h100"})(1, batch, times)
        for words in ((), ("actor.lora.rank=8",), ("actor.ppo_epochs=2",))
    )
    assert adapted["perf/mfu/actor"] == pytest.approx(plain["perf/mfu/actor"] * 2 / 3)
    assert twice["perf/mfu/actor"] == pytest.approx(plain["perf/mfu/actor"] * 2)


def test_what_is_not_known_is_left_out() -> None:
    of_cpu = StepMetrics(config_of("algorithm.adv_estimator=grpo"), 10, {"actor": "cpu"})
    assert not [name for name in of_cpu(1, batch_of(8), {"timing_s/update_actor": 1.0}) if "mfu" in name]
    assert of_cpu(1, None, {}).keys() == {"training/global_step", "training/epoch", "perf/cpu_memory_used_gb"}
