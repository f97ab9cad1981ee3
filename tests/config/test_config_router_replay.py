"""actor.router_replay: models and servers without experts to replay are refused in one sentence."""

import pytest
from config_helpers import DENSE, EXPERTS, load, refusal

from megarl.config import ConfigError, from_yaml, load_config, to_yaml


@pytest.mark.parametrize("chosen", ["old", "rollout"])
def test_a_dense_model_is_refused(chosen: str) -> None:
    said = refusal(f"actor.router_replay={chosen}", *DENSE.split())
    assert said == f"actor.router_replay={chosen}: the model has no experts; expected off"
    assert load("actor.router_replay=off", *DENSE.split()).actor.router_replay == "off"


@pytest.mark.parametrize("chosen", ["off", "old", "rollout"])
def test_a_model_with_experts_may_replay_them(chosen: str) -> None:
    config = load(f"actor.router_replay={chosen}", *EXPERTS.split())
    assert config.actor.router_replay == chosen
    assert from_yaml(to_yaml(config)).actor.router_replay == chosen


def test_the_default_is_off_and_other_words_are_refused() -> None:
    assert load().actor.router_replay == "off"
    assert refusal("actor.router_replay=r3") == "actor.router_replay=r3: expected one of off, old, rollout"


def test_a_bare_off_in_a_file_is_no_truth_value(tmp_path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("actor:\n  router_replay: off\nmodel:\n  path: x\ndata:\n  train_files: [y]\n")
    assert load_config([f"recipe={recipe}"])[0].actor.router_replay == "off"


@pytest.mark.parametrize(
    ("option", "why"),
    [
        ("--enable-hierarchical-cache", "KV that comes back from host memory has lost its experts"),
        ("--enable-hicache", "KV that comes back from host memory has lost its experts"),
        ("--enable-lmcache", "KV that comes back from elsewhere has lost its experts"),
        ("--radix-cache-backend=own", "KV that comes back from elsewhere has lost its experts"),
        (
            "--enable-prefill-cp",
            "each GPU notes experts of its part of a prompt, and they are taken for those of all of it",
        ),
        ("--speculative-algorithm=EAGLE", "the experts of drafted tokens are not kept"),
        (
            "--enable-two-batch-overlap",
            "the experts of one half of a batch are written over those of the other half",
        ),
    ],
)
def test_servers_that_lose_the_experts_of_tokens_are_refused(option: str, why: str) -> None:
    words = (*EXPERTS.split(), f"rollout.sglang.args=['{option}']", "rollout.engine=sglang")
    said = refusal("actor.router_replay=rollout", *words)
    assert said == (f"rollout.sglang.args={option}: {why}; expected actor.router_replay=off or old, or no such option")
    load("actor.router_replay=old", *words)


def test_what_computes_experts_has_to_report_them() -> None:
    """For gpt-oss SGLang itself takes what does not."""
    words = ("model=gpt_oss_mini", "trainer.device=cuda", "rollout.engine=sglang", "actor.router_replay=rollout")
    args = "rollout.sglang.args=['--moe-runner-backend={}']"
    assert refusal(*words) == (
        "actor.router_replay=rollout: SGLang takes --moe-runner-backend=triton_kernel for gpt_oss, and it does not "
        "report which experts it chooses; expected actor.router_replay=off or old, rollout.engine=hf, or in "
        "rollout.sglang.args another one, as --moe-runner-backend=triton"
    )
    load(*words, args.format("triton"))
    load(*words, "rollout.urls=[https://a:1]")  # it is asked at the start
    load(*words[:-1], "actor.router_replay=old")
    load(*words[:2], "rollout.engine=hf", words[-1])
    sparse = ("model=qwen3_moe_mini", *words[1:])
    load(*sparse)
    assert refusal(*sparse, args.format("triton_kernel")) == (
        "rollout.sglang.args=--moe-runner-backend=triton_kernel: it does not report which experts it chooses; expected "
        "another one, or actor.router_replay=off or old"
    )


def test_supervised_training_does_not_read_it() -> None:
    with pytest.raises(ConfigError, match="has no effect, because `megarl sft` does not read it"):
        load_config(["model.path=m", "sft.train_files=z", "actor.router_replay=old"], command="sft")
