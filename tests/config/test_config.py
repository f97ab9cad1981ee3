"""The configuration: recipes and files, keys and types, what follows what, writing and reading."""

from copy import deepcopy
from pathlib import Path

import pytest
import yaml
from config_helpers import KEYS, load, refusal
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.config import Config, ConfigError, from_yaml, load_config, names, read_yaml, recipe_names, resolved, to_yaml
from megarl.config.keys import ELSEWHERE, leaf_types, nearest
from megarl.config.resolve import data_parallel_size
from megarl.config.validate.values import value_of

# ---- the shipped tree, and users' files


@pytest.mark.parametrize("recipe", recipe_names())
def test_every_shipped_recipe_composes_without_a_warning(recipe):
    command = "sft" if recipe.endswith("sft") else "train"
    config, warnings = load_config([f"recipe={recipe}"], command=command)
    assert not warnings
    assert config.trainer.experiment_name == recipe


def test_the_quickstart_is_ppo_with_a_reference_on_two_data_parallel_ranks():
    config, _ = load_config(["recipe=quickstart"])
    assert config.uses_critic and config.uses_reference
    assert config.trainer.num_ranks == data_parallel_size(config, "actor") == 2
    assert config.trainer.run_dir == Path("runs/quickstart")
    grpo, _ = load_config(["recipe=quickstart_grpo"])
    assert not grpo.uses_critic
    assert grpo.data == config.data


def test_an_unknown_recipe_is_refused_with_the_nearest():
    assert refusal("recipe=quikstart").startswith("recipe=quikstart: did you mean quickstart? expected one of ")


def test_two_recipes_are_refused():
    assert "expected one recipe" in refusal("recipe=quickstart", "recipe=quickstart_grpo")


def test_a_file_may_build_on_a_recipe_and_on_another_file(tmp_path):
    (tmp_path / "base.yaml").write_text("recipe: quickstart_grpo\nactor: {optim: {lr: 0.5}}\nrollout: {n: 6}\n")
    (tmp_path / "mine.yaml").write_text("recipe: ./base.yaml\nactor_rollout_ref: {rollout: {n: 7}}\n")
    config, _ = load_config([f"recipe={tmp_path / 'mine.yaml'}", "trainer.seed=5"])
    assert (config.algorithm.adv_estimator, config.actor.optim.lr, config.rollout.n) == ("grpo", 0.5, 7)
    assert config.data.seed == config.rollout.seed == config.trainer.seed == 5


def test_a_mistake_in_a_file_names_the_file(tmp_path):
    """tests/config/test_config_faults.py has mistakes in keys and values."""

    def told(text: str) -> str:
        file = tmp_path / "a.yaml"
        file.write_text(text)
        sentence = refusal(f"recipe={file}")
        assert str(file) in sentence
        return sentence

    assert "lead back" in told("recipe: ./a.yaml")
    assert "cannot be read as YAML" in told("a: [")
    assert "not a list" in told("- a")
    assert "rather than a `defaults` list" in told("defaults: [quickstart]")


def test_keys_of_a_file_that_have_no_effect_are_allowed(tmp_path):
    (tmp_path / "a.yaml").write_text("recipe: quickstart_grpo\nalgorithm: {lam: 0.9}\nsft: {epochs: 3}\n")
    assert load_config([f"recipe={tmp_path / 'a.yaml'}"])[0].algorithm.lam == 0.9


def test_a_bare_off_in_yaml_switches_the_dual_clip_off(tmp_path):
    (tmp_path / "a.yaml").write_text("actor: {clip_ratio_c: off}\n")
    assert load(f"recipe={tmp_path / 'a.yaml'}").actor.clip_ratio_c == "off"


# ---- keys and types


def test_an_unknown_key_is_refused_with_the_nearest_right_one():
    told = refusal("actor.clip_ration=0.1")
    assert told == "actor.clip_ration=0.1: there is no key actor.clip_ration; did you mean actor.clip_ratio?"
    assert "did you mean algorithm.kl_ctrl.kl_coef?" in refusal("trainer.kl_coef=0.1")
    assert "did you mean rollout.n?" in refusal("n=4")
    assert refusal("a b=3").startswith("a b=3: expected key=value")
    assert refusal("zzz=4") == "zzz=4: there is no key zzz; `megarl config` prints them all"


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("data.max_completion_length", "data.max_response_length"),
        ("rollout.max_new_tokens", "data.max_response_length"),
        ("rollout.max_tokens", "data.max_response_length"),
        ("beta", "actor.kl_loss_coef"),
        ("algorithm.beta", "actor.kl_loss_coef"),
        ("distil.beta", "distill.beta"),  # a typing error comes first
        ("per_device_train_batch_size", "actor.ppo_micro_batch_size_per_gpu"),
        ("num_generations", "rollout.n"),
        ("top_k", "rollout.top_k"),
        ("distillation.top_k", "distill.top_k"),  # a group that is alike comes first
        ("steps_per_generation", "data.train_batch_size"),
        ("eval_strategy", "trainer.test_freq"),
        ("project", "trainer.project_name"),
        ("sapo_temperature_pos", "algorithm.policy_loss_args.tau_pos"),
        ("multi_objective_aggregation", "algorithm.adv_estimator"),
        ("peft_config", "actor.lora.rank"),
        ("environment_factory", "agent.fn"),
        ("seed", "trainer.seed"),
        ("trainer.learning_rate", "actor.optim.lr"),
        ("max_steps", "trainer.total_training_steps"),
        ("reward_funcs", "reward.fn"),
        ("output_dir", "trainer.default_local_dir"),
        ("save_steps", "trainer.save_freq"),
        ("epsilon", "actor.clip_ratio_low"),
        ("actor.tensor_parallel_size", "actor.megatron.tensor_model_parallel_size"),
        ("trainer.total_steps", "trainer.total_training_steps"),
        # the group that is typed has a key of this meaning, or none
        ("critic.learning_rate", "critic.optim.lr"),
        ("critic.optim.learning_rate", "critic.optim.lr"),
        ("critic.warmup_steps", "critic.optim.lr_warmup_steps"),
        ("critic.lr_scheduler_type", "critic.optim.lr_decay_style"),
        ("critic.beta", None),
        ("ref.gradient_checkpointing", "ref.megatron.recompute_granularity"),
        ("policy.max_grad_norm", "actor.max_grad_norm"),
        ("policy.optim.lr", "actor.optim.lr"),
        ("policy.learning_rate", "actor.optim.lr"),
        ("value.optim.lr", "critic.optim.lr"),
        ("seed", "trainer.seed"),
        ("teachers.t.beta", None),
        ("teachers.t.log_prob_micro_batch_size", "teachers.t.ppo_micro_batch_size_per_gpu"),
        ("teachers.t.log_prob_max_token_len_per_gpu", "teachers.t.ppo_max_token_len_per_gpu"),
        ("reward.beta", None),
        ("sft.train_dataset", "sft.train_files"),
        ("sft.num_train_epochs", "sft.epochs"),
        ("reward.judge.max_new_tokens", None),
        ("rollout.val_kwargs.max_new_tokens", "rollout.val_kwargs.max_response_length"),
        # letters that are alike by chance
        ("model.lora.kind", None),
        ("model.adapter.type", None),
        ("actor.optim.muon_momentum", None),
        ("trainer.layer_wise_distributed_optimizer", None),
        ("data.max_prompts", None),
    ],
)
def test_a_key_of_another_trainer_is_sent_to_ours_and_letters_alone_to_none(typed: str, meant: str | None) -> None:
    assert nearest(typed) == meant


@given(st.sampled_from(KEYS), st.data())
def test_a_key_that_lacks_a_character_is_taken_for_itself_or_for_one_that_is_as_near(key, data):
    def without(text: str) -> set[str]:
        return {text[:place] + text[place + 1 :] for place in range(len(text))}

    slip = data.draw(st.sampled_from(sorted(without(key) - leaf_types().keys())))
    guess = nearest(slip)
    assert guess is not None and (guess == key or slip in without(guess) or without(slip) & without(guess))


@given(st.sampled_from(KEYS))
def test_a_key_in_the_wrong_group_is_found_by_its_last_name_if_no_other_has_it(key):
    leaf = key.rpartition(".")[2]
    guess = nearest(f"nowhere.{leaf}")
    if sum(other.rpartition(".")[2] == leaf for other in KEYS) == 1 and leaf not in ELSEWHERE:
        assert guess is not None and guess.rpartition(".")[2] == leaf


@pytest.mark.parametrize("word", ["rollout.tool.enable=true", "trainer.custom.path=a.py", "actor.profiler.steps=3"])
def test_a_name_that_several_groups_have_is_no_hint(word):
    assert "did you mean" not in refusal(word)


def test_names_of_ones_own_take_numbers_one_by_one_or_at_once():
    sapo = "algorithm.policy_loss_fn=sapo"
    one = load(sapo, "algorithm.policy_loss_args.tau_pos=2").algorithm.policy_loss_args
    assert one == {"tau_pos": 2.0}
    assert type(one["tau_pos"]) is float
    both = load(sapo, "algorithm.policy_loss_args={tau_pos:2}", "algorithm.policy_loss_args.tau_neg=3")
    assert both.algorithm.policy_loss_args == {"tau_pos": 2.0, "tau_neg": 3.0}
    assert from_yaml(to_yaml(both)) == both
    weights = load(
        "algorithm.adv_estimator=gdpo", "rollout.n=2", "algorithm.reward_weights={reward:1}",
        "algorithm.reward_weights.style.length=0.5",
    ).algorithm.reward_weights  # fmt: skip
    assert weights == {"reward": 1.0, "style.length": 0.5}, "a name may hold a dot"
    mine = ("algorithm.plugins=[a.py]", "algorithm.adv_estimator=mine")
    own = load(*mine, "algorithm.adv_estimator_args={how:fast,often:3,yes:true}")
    assert own.algorithm.adv_estimator_args == {"how": "fast", "often": 3, "yes": True}


def test_names_of_ones_own_add_to_a_files_and_an_empty_set_clears_them(tmp_path):
    (tmp_path / "a.yaml").write_text("algorithm: {policy_loss_fn: sapo, policy_loss_args: {tau_pos: 2}}\n")
    recipe = f"recipe={tmp_path / 'a.yaml'}"
    assert load(recipe, "algorithm.policy_loss_args.tau_neg=3").algorithm.policy_loss_args == {
        "tau_pos": 2.0,
        "tau_neg": 3.0,
    }
    assert load(recipe, "algorithm.policy_loss_args={}").algorithm.policy_loss_args == {}


# ---- what words make of the configuration, and what follows what: WORDS | KEY=VALUE | ...

TAKEN = """
actor.optim={lr:1e-4,betas:[0.8,0.9]} | actor.optim.lr=0.0001 | actor.optim.betas=[0.8, 0.9] | actor.optim.eps=1.0e-8
trainer.logger=console data.val_files=[b.jsonl] | trainer.logger=[console] | data.val_files=[b.jsonl]
actor.optim.lr=0.25 critic.optim.lr=${actor.optim.lr} | critic.optim.lr=0.25
actor.clip_ratio_c=off | actor.clip_ratio_c='off'
actor.clip_ratio_c=3 | actor.clip_ratio_c=3.0
# sources
model.path=m2 | model.tokenizer_path=m2 | critic.model.path=m2 | ref.model.path=m2
trainer.seed=3 | data.seed=3 | rollout.seed=3
trainer.seed=7 data.seed=null | data.seed=7
actor.ppo_mini_batch_size=64 actor.max_grad_norm=0.5 | critic.ppo_mini_batch_size=64 | critic.max_grad_norm=0.5
data.train_batch_size=128 | actor.ppo_mini_batch_size=128
data.max_prompt_length=100 data.max_response_length=50 | agent.max_tokens=150 | actor.loss_scale_factor=50
agent.command=[a] agent.max_tokens=30000 | agent.max_tokens=30000 | actor.ppo_max_token_len_per_gpu=30000
@4 actor.@tp=4 critic.@tp=null | critic.@tp=4 | ref.@tp=4
@4 actor.@tp=2 critic.@tp=4 actor.use_kl_loss=true | actor.@tp=2 | critic.@tp=4 | ref.@tp=2
# micro-batches are cut by tokens unless it is said otherwise
model.path=m | actor.ppo_micro_batch_size_per_gpu=null | actor.ppo_max_token_len_per_gpu=16384
model.path=m | critic.ppo_max_token_len_per_gpu=16384 | ref.ppo_max_token_len_per_gpu=16384
data.max_response_length=20000 | actor.ppo_max_token_len_per_gpu=21024
actor.ppo_micro_batch_size_per_gpu=2 | actor.ppo_max_token_len_per_gpu=null | critic.ppo_micro_batch_size_per_gpu=2
recipe=gsm8k_qwen2_5_0_5b_1gpu actor.ppo_max_token_len_per_gpu=4096 | actor.ppo_micro_batch_size_per_gpu=null
recipe=gsm8k_qwen2_5_0_5b_1gpu actor.ppo_max_token_len_per_gpu=4096 | critic.ppo_micro_batch_size_per_gpu=2
# momentum is that of the optimizer
actor.optim.name=muon | actor.optim.momentum=0.95
actor.optim.name=sgd | actor.optim.momentum=0.0
actor.optim.name=muon actor.optim.momentum=0.5 | actor.optim.momentum=0.5
# ranks of a role
@4 actor.num_ranks=2 critic.first_rank=2 critic.@tp=2 | actor.first_rank=0 | critic.first_rank=2 | critic.num_ranks=2
@4 actor.num_ranks=2 critic.first_rank=2 critic.@tp=2 | ref.first_rank=0 | ref.num_ranks=2
@4 critic.first_rank=3 critic.strategy=none | actor.num_ranks=4 | critic.num_ranks=1
"""


@pytest.mark.parametrize("row", [line for line in TAKEN.strip().splitlines() if not line.startswith("#")])
def test_words_make_a_configuration_of_these_values(row):
    row = row.replace("@4", "trainer.n_gpus_per_node=4").replace("@tp", "megatron.tensor_model_parallel_size")
    words, *wanted = row.split(" | ")
    config = load(*words.split())
    for key, _, value in (word.partition("=") for word in wanted):
        assert value_of(config, key) == yaml.safe_load(value), key


def test_values_that_refer_to_no_other_key_or_to_one_of_another_type_are_refused():
    assert "actor.optim.lr=${nope.x}: Interpolation key 'nope.x' not found" in refusal("actor.optim.lr=${nope.x}")
    told = refusal("actor.optim.betas=${trainer.seed}")
    assert told == "actor.optim.betas=${trainer.seed}: it is 0; expected a list of numbers"


def test_resolving_twice_changes_nothing():
    config = load("trainer.n_gpus_per_node=2", "actor.ppo_micro_batch_size_per_gpu=4")
    assert resolved(config) == config
    assert resolved(Config()).critic.megatron.tensor_model_parallel_size == 1


# ---- writing and reading

DEFAULTS = resolved(Config())


@settings(max_examples=5)
@given(
    st.fixed_dictionaries(
        {
            "actor.optim.lr": st.floats(1e-12, 1e3),
            "actor.clip_ratio_c": st.none() | st.just("off") | st.floats(1.0001, 1e6),
            "critic.cliprange_value": st.none() | st.floats(1e-6, 10),
            "data.max_response_length": st.integers(1, 8192),
            "trainer.total_training_steps": st.none() | st.integers(1, 10**9),
        }
    ),
    st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), min_size=1),
    st.lists(st.sampled_from(names.LOGGERS)),
)
def test_what_is_written_is_read_back(values, text, loggers):
    config = deepcopy(DEFAULTS)
    for key, value in values.items():
        group, _, name = key.rpartition(".")
        setattr(value_of(config, group), name, value)
    config.trainer.logger = loggers
    config.data.system_prompt = text
    assert from_yaml(to_yaml(config)) == config


def test_the_written_form_names_every_key():
    def flat(node: dict, prefix: str = "") -> list[str]:
        out = []
        for name, value in node.items():
            out += flat(value, f"{prefix}{name}.") if isinstance(value, dict) and value else [f"{prefix}{name}"]
        return out

    assert sorted(flat(yaml.safe_load(to_yaml(load())))) == KEYS


def test_what_is_no_configuration_is_not_read():
    for text in ("actor: {clip_ration: 1}", "actor: [", "rollout: {n: many}"):
        with pytest.raises(ConfigError, match="this is no configuration of a run"):
            from_yaml(text)


def test_a_file_of_another_version_is_named_with_its_key(tmp_path):
    """Before rewards were a list, a run wrote the name of one."""
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(load()))
    assert read_yaml(file) == load()
    advice = (
        "another version of megarl may have written it: correct it by docs/configuration.md, or begin a new run "
        "(trainer.resume_mode=disable, or another trainer.experiment_name)"
    )
    for text, fault in {
        "reward: {fn: text}": "reward.fn=text: expected a list of texts",
        "rollout: {n: many}": "rollout.n=many: expected an integer",
        "actor: {clip_ration: 1}": "actor.clip_ration: expected a key of this version",
    }.items():
        file.write_text(text)
        with pytest.raises(ConfigError) as error:
            read_yaml(file)
        assert str(error.value) == f"{file}: this is no configuration of a run: {fault}; {advice}"
