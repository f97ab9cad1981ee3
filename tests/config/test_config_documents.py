"""The documents that users come from: each of their commands and YAML blocks composes, or is refused by name."""

import shlex
from pathlib import Path

import pytest
from config_helpers import BASE, KEYS, load, refusal
from refusal_table import Block, blocks

from megarl.config import Config, from_yaml, load_config, to_yaml
from megarl.config.aliases import canonical
from megarl.config.describe import description
from megarl.config.validate.values import value_of

DOCUMENTS = Path(__file__).parents[1] / "fixtures/source_documents"


def lines_of(name: str) -> list[str]:
    lines = (line.partition("#")[0].strip() for line in (DOCUMENTS / name).read_text().splitlines())
    return [line for line in lines if line]


# Names that the documents themselves only register as examples.
REFUSED = {
    "algorithm.policy_loss_fn=my_custom_loss": "or a name that a file in algorithm.plugins registers",
    "algorithm.policy_loss_fn=my_ppo_variant": "or a name that a file in algorithm.plugins registers",
    "algorithm.adv_estimator=my_advantage": "or a name that a file in algorithm.plugins registers",
}
# Documented values that run, with a word of warning.
WARNED = {
    "actor_rollout_ref.actor.strategy=fsdp": "actor.strategy=fsdp, critic.strategy=fsdp: no two ranks share",
    "critic.strategy=fsdp": "critic.strategy=fsdp: no two ranks share a parameter",
    "actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_type=kl": "expected gradient is zero",
}


@pytest.mark.parametrize("command", lines_of("commands.txt") + lines_of("keys.txt"))
def test_every_documented_command_composes_or_is_refused_by_name(command):
    words = ["rollout.n=4", *command.split()]
    if command in REFUSED:
        assert REFUSED[command] in refusal(*words)
        return
    config, warnings = load_config([*BASE, *words])
    assert isinstance(config, Config)
    assert bool(warnings) == (command in WARNED)
    for warning in warnings:
        assert WARNED[command] in warning


KEYS_OF_THE_REFERENCE_RUN = (
    "actor.ppo_micro_batch_size_per_gpu",
    "actor.ppo_mini_batch_size",
    "critic.model.path",
    "critic.ppo_micro_batch_size_per_gpu",
    "critic.ppo_mini_batch_size",
    "data.train_batch_size",
    "model.path",
    "rollout.tensor_model_parallel_size",
    "trainer.n_gpus_per_node",
)


def test_the_reference_run_composes_as_the_recipe_that_carries_it():
    text = (DOCUMENTS / "reference_run.sh").read_text().replace("\\\n", " ").replace("\n", " ")
    words = shlex.split(text)[2:]  # after `bash run_gemma.sh`
    assert len(words) == 9
    typed, warnings = load_config(["data.train_files=[a.jsonl]", *words])
    assert [warning.partition(":")[0] for warning in warnings] == [
        "verl's defaults for what the command does not set",
        "actor.strategy=fsdp, critic.strategy=fsdp",
        "Qwen/Qwen2.5-0.5B-Instruct",
    ]
    recipe, _ = load_config(["recipe=gsm8k_qwen2_5_0_5b_1gpu"])
    for key in KEYS_OF_THE_REFERENCE_RUN:
        assert value_of(typed, key) == value_of(recipe, key), key
    assert typed.trainer.logger == ["console"]
    assert (recipe.data.max_prompt_length, recipe.data.max_response_length) == (1024, 512)
    assert (recipe.actor.optim.lr, recipe.critic.optim.lr, recipe.algorithm.kl_ctrl.kl_coef) == (1e-6, 1e-5, 1e-3)


BLOCKS = {
    "critic.yaml": {"critic.strategy": "megatron"},
    "fsdp.yaml": {"actor.megatron.param_offload": False, "actor.megatron.optimizer_offload": False},
    "gae.yaml": {"algorithm.lam": 0.95, "algorithm.gamma": 0.99},
    "gradient_clipping.yaml": {"actor.max_grad_norm": 1.0},
    "learning_rate.yaml": {"actor.optim.lr": 1e-6, "actor.optim.betas": [0.9, 0.999], "actor.optim.weight_decay": 0.0},
    "policy_loss.yaml": {"actor.use_kl_loss": True, "actor.entropy_coeff": 0.01, "actor.kl_loss_type": "low_var_kl"},
}
WARNINGS_OF_BLOCKS = {"critic.yaml": 1, "fsdp.yaml": 1}


@pytest.mark.parametrize("name", sorted(path.name for path in DOCUMENTS.glob("*.yaml")))
def test_every_documented_yaml_block_composes(name):
    config, warnings = load_config([*BASE, f"recipe={DOCUMENTS / name}"])
    assert {key: value_of(config, key) for key in BLOCKS[name]} == BLOCKS[name]
    assert len(warnings) == WARNINGS_OF_BLOCKS.get(name, 0)


def test_the_prefix_of_the_documents_is_dropped_in_front_of_every_key():
    for key in KEYS:
        assert canonical(f"actor_rollout_ref.{key}") == canonical(f"actor_rollout.ref.{key}") == (key, None)


def test_adding_and_forcing_are_the_same_as_setting():
    assert load("+rollout.n=4") == load("++actor_rollout_ref.rollout.n=4") == load("rollout.n=4")


def test_one_beta_leaves_the_other_as_it_was():
    assert load("actor.optim.betas=[0.8,0.7]", "actor.optim.beta2=0.6").actor.optim.betas == [0.8, 0.6]
    assert refusal("actor.optim.beta1=x") == "actor.optim.beta1=x: expected a number"


def test_the_engine_cpu_is_another_name_of_hf():
    assert load("rollout.engine=cpu") == load("rollout.engine=hf")
    assert from_yaml(to_yaml(load()).replace("engine: auto", "engine: cpu")) == load("rollout.engine=hf")
    assert description("rollout.engine").allowed == "auto | hf (or cpu) | sglang"


NOT_SHARED = """
with recipe=quickstart trainer.n_gpus_per_node=4 trainer.device=cuda actor.megatron.transformer_impl=transformer_engine
with model.dtype=bfloat16
trainer.share_prefixes=on | it is not built for actor.megatron.transformer_impl= .. expected auto or off

with recipe=quickstart trainer.n_gpus_per_node=4 model=qwen3_moe_mini actor.megatron.tensor_model_parallel_size=2
with actor.megatron.sequence_parallel=true actor.router_replay=old
trainer.share_prefixes=on | it is not built for actor.router_replay=old .. expected auto or off

with recipe=quickstart trainer.n_gpus_per_node=4 actor.megatron.context_parallel_size=2
trainer.share_prefixes=on | it is not built for actor.megatron.context_parallel_size=2 .. expected auto or off
"""


@pytest.mark.parametrize("block", blocks(NOT_SHARED))
def test_where_prefixes_are_not_shared_is_said(block: Block) -> None:
    block.check()
