"""The configuration: recipes and files, keys and types, what follows what, writing and reading."""

import re
from copy import deepcopy
from pathlib import Path

import pytest
import yaml
from config_helpers import KEYS, load, refusal
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.config import (
    Config,
    ConfigError,
    from_yaml,
    load_config,
    names,
    read_yaml,
    recipe_names,
    resolved,
    to_yaml,
)
from megarl.config.keys import followed, leaf_types, nearest
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


def test_the_quickstart_runs_on_pipeline_parallel_ranks_by_override():
    config, _ = load_config(
        [
            "recipe=quickstart",
            "trainer.experiment_name=pp",
            "actor.megatron.tensor_model_parallel_size=1",
            "actor.megatron.pipeline_model_parallel_size=2",
        ]  # fmt: skip
    )
    for role in (config.actor, config.critic, config.ref):
        assert (role.megatron.tensor_model_parallel_size, role.megatron.pipeline_model_parallel_size) == (1, 2)


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
    def told(text: str) -> str:
        file = tmp_path / "a.yaml"
        file.write_text(text)
        return refusal(f"recipe={file}").replace(str(tmp_path), "")

    assert told("actor: {clip_ration: 0.1}") == (
        "/a.yaml: actor.clip_ration=0.1: there is no key actor.clip_ration; did you mean actor.clip_ratio?"
    )
    assert told("rollout: {n: many}") == "/a.yaml: rollout.n=many: expected an integer"
    assert "lead back" in told("recipe: ./a.yaml")
    assert "cannot be read as YAML" in told("a: [")
    assert "not a list" in told("- a")
    assert "rather than a `defaults` list" in told("defaults: [quickstart]")
    assert refusal(f"recipe={tmp_path}/absent.yaml").startswith(f"recipe={tmp_path}/absent.yaml: no such file")


def test_keys_of_a_file_that_have_no_effect_are_allowed(tmp_path):
    (tmp_path / "a.yaml").write_text("recipe: quickstart_grpo\nalgorithm: {lam: 0.9}\nsft: {epochs: 3}\n")
    assert load_config([f"recipe={tmp_path / 'a.yaml'}"])[0].algorithm.lam == 0.9


def test_a_bare_off_in_yaml_switches_the_dual_clip_off(tmp_path):
    (tmp_path / "a.yaml").write_text("actor: {clip_ratio_c: off}\n")
    assert load(f"recipe={tmp_path / 'a.yaml'}").actor.clip_ratio_c == "off"
    assert load("actor.clip_ratio_c=off").actor.clip_ratio_c == "off"
    assert load("actor.clip_ratio_c=3").actor.clip_ratio_c == 3.0


# ---- keys and types


def test_an_unknown_key_is_refused_with_the_nearest_right_one():
    told = refusal("actor.clip_ration=0.1")
    assert told == "actor.clip_ration=0.1: there is no key actor.clip_ration; did you mean actor.clip_ratio?"
    assert "did you mean algorithm.kl_ctrl.kl_coef?" in refusal("trainer.kl_coef=0.1")
    assert "did you mean rollout.n?" in refusal("n=4")
    assert refusal("zzz=4") == "zzz=4: there is no key zzz; `megarl config` prints them all"


def slips(key: str) -> st.SearchStrategy[str]:
    """One character left out, put in, or replaced."""
    place, letter = st.integers(0, len(key) - 1), st.sampled_from("abcdefghijklmnopqrstuvwxyz_")
    return st.one_of(
        st.builds(lambda i: key[:i] + key[i + 1 :], place),
        st.builds(lambda i, c: key[:i] + c + key[i:], place, letter),
        st.builds(lambda i, c: key[:i] + c + key[i + 1 :], place, letter),
    )


def distance(a: str, b: str) -> int:
    """Levenshtein's: single characters to leave out, put in or replace between a and b."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        last, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            last, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, last + (x != y))
    return row[-1]


@given(st.data())
def test_a_slip_of_one_character_is_refused_and_the_nearest_key_named(data):
    key = data.draw(st.sampled_from(KEYS))
    slip = data.draw(slips(key).filter(lambda text: text not in leaf_types() and re.fullmatch(r"\w+(\.\w+)+", text)))
    told = refusal(f"{slip}=1")
    guess = re.fullmatch(rf"{re.escape(slip)}=1: there is no key \S+; did you mean (\S+)\?", told)
    assert guess, told
    assert guess[1] == key or distance(slip, guess[1]) == 1


@given(st.sampled_from(KEYS))
def test_a_key_in_the_wrong_group_is_found_by_its_last_name_if_no_other_has_it(key):
    leaf = key.rpartition(".")[2]
    guess = nearest(f"nowhere.{leaf}")
    if sum(other.rpartition(".")[2] == leaf for other in KEYS) == 1:
        assert guess is not None and guess.rpartition(".")[2] == leaf


@pytest.mark.parametrize("word", ["rollout.tool.enable=true", "trainer.custom.path=a.py", "actor.profiler.steps=3"])
def test_a_name_that_several_groups_have_is_no_hint(word):
    assert "did you mean" not in refusal(word)


@pytest.mark.parametrize(
    ("word", "wanted"),
    [
        ("rollout.n=many", "expected an integer"),
        ("rollout.n=1.5", "expected an integer"),
        ("rollout.n=null", "expected an integer"),
        ("rollout.n=true", "expected an integer"),
        ("actor.optim.lr=fast", "expected a number"),
        ("actor.use_kl_loss=2", "expected true or false"),
        ("actor.optim.betas=[a,b]", "expected a list of numbers"),
        ("actor.optim.betas=0.9", "expected a list of numbers"),
        ("trainer.logger=[[a]]", "expected a list of texts"),
        ("trainer.total_training_steps=soon", "expected an integer or null"),
        ("actor.clip_ratio_c=[1]", "expected a number, text or null"),
        ("trainer.experiment_name=[a]", "expected text"),
        ("algorithm.policy_loss_args=3", "expected names with a number each, as {name:0.1}"),
        ("algorithm.policy_loss_args.beta=x", "expected a number"),
        ("algorithm.reward_weights={format:[1]}", "expected a number"),
        ("algorithm.adv_estimator_args=3", "expected names with a value each, as {name:0.1}"),
        ("algorithm.adv_estimator_args.a=[1]", "expected a value"),
        ("actor.optim=3", "actor.optim is a group of keys; expected actor.optim.NAME=VALUE"),
        ("recipe=3", "expected the name of a recipe or the path of a YAML file"),
    ],
)
def test_a_wrong_type_is_told_with_key_value_and_what_is_wanted(word, wanted):
    assert refusal(word) == f"{word}: {wanted}"


@pytest.mark.parametrize("word", ["rollout.n", "~rollout.n", "rollout.n=1,2", "rollout.n=range(3)", "=3", "a b=3"])
def test_what_is_no_key_and_value_is_refused(word):
    assert refusal(word).startswith(f"{word}: ")


def test_a_group_may_be_set_at_once():
    optim = load("actor.optim={lr:1e-4,betas:[0.8,0.9]}").actor.optim
    assert (optim.lr, optim.betas, optim.eps) == (1e-4, [0.8, 0.9], 1e-8)


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


def test_a_single_file_or_name_stands_for_a_list_of_one():
    config = load("trainer.logger=console", "data.val_files=[b.jsonl]")
    assert (config.trainer.logger, config.data.val_files) == (["console"], ["b.jsonl"])


def test_a_value_may_refer_to_another_key():
    assert load("actor.optim.lr=0.25", "critic.optim.lr=${actor.optim.lr}").critic.optim.lr == 0.25
    assert "actor.optim.lr=${nope.x}: Interpolation key 'nope.x' not found" in refusal("actor.optim.lr=${nope.x}")
    assert refusal("actor.optim.betas=${trainer.seed}") == (
        "actor.optim.betas=${trainer.seed}: it is 0; expected a list of numbers"
    )


# ---- what follows what


def test_everything_follows_its_source_unless_set():
    config = load("model.path=m2", "trainer.seed=3", "actor.ppo_mini_batch_size=64", "actor.max_grad_norm=0.5")
    assert config.model.tokenizer_path == config.critic.model.path == config.ref.model.path == "m2"
    assert config.critic.ppo_mini_batch_size == 64
    assert config.critic.max_grad_norm == 0.5
    assert config.data.seed == config.rollout.seed == 3
    assert load().actor.ppo_mini_batch_size == load().data.train_batch_size
    assert load().actor.loss_scale_factor == load().data.max_response_length


def test_null_means_follow():
    source = ("trainer.n_gpus_per_node=4", "actor.megatron.tensor_model_parallel_size=4", "trainer.seed=7")
    config = load(*source, "critic.megatron.tensor_model_parallel_size=null", "data.seed=null")
    assert (config.critic.megatron.tensor_model_parallel_size, config.data.seed) == (4, 7)
    assert {"critic.ppo_epochs", "ref.model.path", "rollout.dtype", "model.tokenizer_path"} <= followed().keys()


def test_the_critic_may_have_its_own_layout_and_the_reference_still_follows_the_actor():
    config = load(
        "trainer.n_gpus_per_node=4", "actor.megatron.tensor_model_parallel_size=2",
        "critic.megatron.tensor_model_parallel_size=4", "actor.use_kl_loss=true",
    )  # fmt: skip
    assert [r.megatron.tensor_model_parallel_size for r in (config.actor, config.critic, config.ref)] == [2, 4, 2]


def cut(role) -> tuple[int | None, ...]:
    names = [name for name in vars(role) if "micro_batch_size" in name or "max_token_len" in name]
    return tuple(getattr(role, name) for name in names)


def test_micro_batches_are_cut_by_tokens_unless_said_otherwise():
    config = load()
    assert cut(config.actor) == cut(config.critic) == cut(config.ref) == (None, None, 16384)
    assert cut(load("data.max_response_length=20000").actor) == (None, None, 21024)


def test_a_micro_batch_over_all_ranks_becomes_one_per_rank():
    config = load("trainer.n_gpus_per_node=4", "actor.ppo_micro_batch_size=8", "actor.use_kl_loss=true",
                  "critic.megatron.tensor_model_parallel_size=2")  # fmt: skip
    assert cut(config.actor) == cut(config.ref) == (None, 2, None)
    assert cut(config.critic) == (None, 4, None)  # two ranks hold one critic, so there are two of them


def test_a_typed_cut_takes_the_place_of_the_recipes():
    config, _ = load_config(["recipe=gsm8k_qwen2_5_0_5b_1gpu", "actor.ppo_max_token_len_per_gpu=4096"])
    assert cut(config.actor) == (None, None, 4096)
    assert cut(config.critic) == (None, 2, None)


def test_two_cuts_at_once_are_refused():
    told = refusal("actor.ppo_micro_batch_size=2", "actor.ppo_max_token_len_per_gpu=4096")
    assert told == (
        "actor.ppo_micro_batch_size=2 and actor.ppo_max_token_len_per_gpu=4096: expected only one of them, the others "
        "null"
    )


def test_resolving_twice_changes_nothing():
    config = load("trainer.n_gpus_per_node=2", "actor.ppo_micro_batch_size=4")
    assert resolved(config) == config
    assert resolved(Config()).critic.megatron.tensor_model_parallel_size == 1


# ---- writing and reading

DEFAULTS = resolved(Config())


@settings(max_examples=10)
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
