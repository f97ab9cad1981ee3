"""The documents that users come from: each of their commands and YAML blocks composes, or is refused by name."""

import shlex
from pathlib import Path

import pytest
from config_helpers import BASE, KEYS, load, refusal

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


def test_the_table_of_refusals_names_only_documented_commands():
    documented = set(lines_of("commands.txt") + lines_of("keys.txt"))
    assert REFUSED.keys() | WARNED.keys() <= documented


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


@pytest.mark.parametrize(
    ("words", "overlong"),
    [
        ("data.truncation=left", "left"),
        ("data.filter_overlong_prompts=True data.truncation=error", "filter"),
        ("data.truncation=middle data.filter_overlong_prompts=True", "filter"),
        ("data.truncation=right data.filter_overlong_prompts=False", "right"),
        ("recipe=grpo_qwen3_8b_1x8h100 data.filter_overlong_prompts=False", "error"),
        ("data.overlong_prompts=filter", "filter"),
    ],
)
def test_filtering_comes_before_truncation_whatever_their_order(words, overlong):
    config, _ = load_config([*BASE, *words.split()])
    assert config.data.overlong_prompts == overlong


def test_adding_and_forcing_are_the_same_as_setting():
    assert load("+rollout.n=4") == load("++actor_rollout_ref.rollout.n=4") == load("rollout.n=4")


@pytest.mark.parametrize(
    ("words", "key", "value"),
    [
        ("actor.policy_loss.loss_mode=gspo actor.loss_agg_mode=seq-mean-token-mean", "policy_loss_fn", "gspo"),
        (
            "actor.policy_loss.loss_mode=clip_cov actor.policy_loss.clip_cov_ratio=0.1 actor.policy_loss.clip_cov_lb=2 "
            "actor_rollout_ref.actor.policy_loss.clip_cov_ub=3",
            "policy_loss_args",
            {"clip_cov_ratio": 0.1, "clip_cov_lb": 2.0, "clip_cov_ub": 3.0},
        ),
        (
            "actor.policy_loss.loss_mode=kl_cov actor.policy_loss.kl_cov_ratio=0.1 actor.policy_loss.ppo_kl_coef=2",
            "policy_loss_args",
            {"kl_cov_ratio": 0.1, "ppo_kl_coef": 2.0},
        ),
        (
            "algorithm.policy_loss_fn=sapo actor.tau_pos=2 actor.tau_neg=3",
            "policy_loss_args",
            {"tau_pos": 2.0, "tau_neg": 3.0},
        ),
        ("reward.overlong_buffer.enable=true reward.overlong_buffer.len=64", "overlong_buffer.len", 64),
        (
            "reward_model.overlong_buffer.enable=true reward_model.overlong_buffer.len=64 "
            "reward_model.overlong_buffer.penalty_factor=0.5",
            "overlong_buffer.penalty_factor",
            0.5,
        ),
        ("algorithm.filter_groups.enable=true algorithm.filter_groups.metric=acc", "filter_groups.metric", "acc"),
        (
            "algorithm.rollout_correction.rollout_is=token algorithm.rollout_correction.rollout_is_threshold=3",
            "rollout_correction.truncate",
            3.0,
        ),
        ("algorithm.rollout_correction.bypass_mode=true", "rollout_correction.bypass", True),
    ],
)
def test_further_spellings_of_verl_mean_the_same(words, key, value):
    assert value_of(load("rollout.n=2", *words.split()).algorithm, key) == value


def test_one_beta_leaves_the_other_as_it_was():
    assert load("actor.optim.betas=[0.8,0.7]", "actor.optim.beta2=0.6").actor.optim.betas == [0.8, 0.6]
    assert refusal("actor.optim.beta1=x") == "actor.optim.beta1=x: expected a number"


@pytest.mark.parametrize(
    ("word", "key", "value"),
    [
        (
            "actor.megatron.override_transformer_config.recompute_granularity=selective",
            "recompute_granularity",
            "selective",
        ),
        ("actor.megatron.override_ddp_config.overlap_grad_reduce=true", "overlap_grad_reduce", True),
        ("actor_rollout_ref.actor.fsdp_config.param_offload=True", "param_offload", True),
        ("actor.fsdp_config.optimizer_offload=True", "optimizer_offload", True),
        ("actor.megatron.param_offload=True", "param_offload", True),
        (
            "actor.megatron.override_transformer_config.num_layers_in_last_pipeline_stage=2",
            "num_layers_in_last_pipeline_stage",
            2,
        ),
    ],
)
def test_verls_places_for_how_a_role_is_computed_mean_ours(word, key, value):
    on_two = ("trainer.n_gpus_per_node=4", "actor.megatron.pipeline_model_parallel_size=2")
    assert getattr(load(*on_two, word).actor.megatron, key) == value


def test_verls_places_for_the_other_roles_mean_ours():
    assert load("critic.model.fsdp_config.param_offload=True").critic.megatron.param_offload
    reference = load("actor.use_kl_loss=true", "actor_rollout_ref.ref.fsdp_config.param_offload=True").ref
    assert reference.megatron.param_offload
    served = load("rollout.engine=sglang", "actor_rollout_ref.rollout.gpu_memory_utilization=0.6").rollout
    assert served.memory_fraction == 0.6


@pytest.mark.parametrize(
    ("word", "instead"),
    [
        ("actor_rollout_ref.actor.fsdp_config.fsdp_size=-1", "strategy=fsdp shards everything"),
        ("actor.megatron.grad_offload=True", "with param_offload"),
        ("actor.megatron.use_mbridge=True", "Hugging Face folders"),
        ("critic.megatron.use_dist_checkpointing=True", "shard by shard"),
        ("actor_rollout_ref.rollout.free_cache_engine=True", "rollout.placement=shared"),
    ],
)
def test_a_key_without_meaning_warns_once_and_says_what_replaces_it(word, instead):
    _, warnings = load_config([*BASE, word, word])
    assert len(warnings) == 1
    assert instead in warnings[0]


def test_the_engine_cpu_is_another_name_of_hf():
    assert load("rollout.engine=cpu") == load("rollout.engine=hf")
    assert from_yaml(to_yaml(load()).replace("engine: auto", "engine: cpu")) == load("rollout.engine=hf")
    assert description("rollout.engine").allowed == "auto | hf (or cpu) | sglang"


@pytest.mark.parametrize(("value", "ours"), [("True", "auto"), ("False", "off")])
def test_verls_grouper_of_prefixes_is_taken_with_its_meaning(value: str, ours: str) -> None:
    config, _ = load_config(["recipe=quickstart", f"actor_rollout_ref.actor.use_prefix_grouper={value}"])
    assert config.trainer.share_prefixes == ours


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ("trainer.device=cuda actor.megatron.transformer_impl=transformer_engine", "actor.megatron.transformer_impl="),
        (
            "model=qwen3_moe_mini actor.megatron.tensor_model_parallel_size=2 actor.megatron.sequence_parallel=true "
            "actor.router_replay=old",
            "actor.router_replay=old",
        ),
        ("actor.megatron.context_parallel_size=2", "actor.megatron.context_parallel_size=2"),
    ],
)
def test_where_prefixes_are_not_shared_is_said(words: str, key: str) -> None:
    said = refusal("recipe=quickstart", "trainer.n_gpus_per_node=4", "trainer.share_prefixes=on", *words.split())
    assert said.startswith(f"trainer.share_prefixes=on: it is not built for {key}")
    assert said.endswith("; expected auto or off")


def test_prefixes_are_shared_on_gpus_where_it_is_asked_for() -> None:
    words = ["recipe=quickstart", "trainer.device=cuda", "trainer.share_prefixes=on"]
    config, _ = load_config(words, command="config")
    assert config.trainer.share_prefixes == "on"
