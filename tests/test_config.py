"""The configuration: what composes, what is refused and in which words, what follows what."""

import re
import shlex
import time
from copy import deepcopy
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl import algo, rewards, rollout
from megarl.config import (
    Config,
    ConfigError,
    config_dir,
    from_yaml,
    load_config,
    names,
    recipe_names,
    resolved,
    to_yaml,
)
from megarl.config.aliases import canonical
from megarl.config.checks import CHOICES, OPEN_CHOICES, RANGES, value_of
from megarl.config.inert import TABLE
from megarl.config.keys import followed, leaf_types, nearest

DOCUMENTS = Path(__file__).parent / "fixtures/source_documents"
BASE = ("data.train_files=a.jsonl", "model.path=m")  # what no run can do without
KEYS = sorted(leaf_types())


def load(*overrides: str, command: str = "train") -> Config:
    config, warnings = load_config([*BASE, *overrides], command=command)
    assert not warnings, warnings
    return config


def refusal(*overrides: str, command: str = "train") -> str:
    with pytest.raises(ConfigError) as caught:
        load_config([*BASE, *overrides], command=command)
    sentence = str(caught.value)
    assert "\n" not in sentence
    return sentence


# ---- the documents that users come from


def lines_of(name: str) -> list[str]:
    lines = (line.partition("#")[0].strip() for line in (DOCUMENTS / name).read_text().splitlines())
    return [line for line in lines if line]


# Documented names that are not built (yet), and those that the documents themselves only register as examples.
REFUSED = {
    "algorithm.policy_loss_fn=my_custom_loss": "want one of ppo, vanilla, grpo, reinforce, or a name",
    "algorithm.policy_loss_fn=my_ppo_variant": "want one of ppo, vanilla, grpo, reinforce, or a name",
    "algorithm.adv_estimator=rloo": "want one of gae, grpo, or a name",
    "algorithm.adv_estimator=remax": "want one of gae, grpo, or a name",
    "algorithm.adv_estimator=reinforce_plus_plus": "want one of gae, grpo, or a name",
    "algorithm.adv_estimator=reinforce_plus_plus_baseline": "want one of gae, grpo, or a name",
    "algorithm.adv_estimator=my_advantage": "want one of gae, grpo, or a name",
    "actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_type=full": "want one of kl, k1, mse",
    "algorithm.use_kl_in_reward=True algorithm.kl_penalty=full": "want one of kl, k1, mse",
}
# Documented values that run, with a word of warning.
WARNED = {
    "actor_rollout_ref.actor.strategy=fsdp": "is trained as strategy=megatron",
    "critic.strategy=fsdp": "is trained as strategy=megatron",
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
    typed, warnings = load_config(["data.train_files=a.jsonl", *words])
    assert not warnings
    recipe, _ = load_config(["recipe=gsm8k_qwen2_5_0_5b_1gpu"])
    for key in KEYS_OF_THE_REFERENCE_RUN:
        assert value_of(typed, key) == value_of(recipe, key), key
    assert typed.trainer.logger == ["console"]
    assert (recipe.data.max_prompt_length, recipe.data.max_response_length) == (1024, 512)
    assert (recipe.actor.optim.lr, recipe.critic.optim.lr, recipe.algorithm.kl_ctrl.kl_coef) == (1e-6, 1e-5, 1e-3)


BLOCKS = {
    "critic.yaml": {"critic.strategy": "megatron"},
    "fsdp.yaml": {},
    "gae.yaml": {"algorithm.lam": 0.95, "algorithm.gamma": 0.99},
    "gradient_clipping.yaml": {"actor.max_grad_norm": 1.0},
    "learning_rate.yaml": {"actor.optim.lr": 1e-6, "actor.optim.betas": [0.9, 0.999], "actor.optim.weight_decay": 0.0},
    "policy_loss.yaml": {"actor.use_kl_loss": True, "actor.entropy_coeff": 0.01, "actor.kl_loss_type": "low_var_kl"},
}
WARNINGS_OF_BLOCKS = {"critic.yaml": 1, "fsdp.yaml": 3}


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
    assert refusal("actor.optim.beta1=x") == "actor.optim.beta1=x: want a number"


def test_a_key_without_meaning_warns_once_and_says_what_replaces_it():
    word = "actor_rollout_ref.actor.fsdp_config.param_offload=False"
    _, warnings = load_config([*BASE, word, word])
    assert len(warnings) == 1
    assert "actor.megatron.use_distributed_optimizer" in warnings[0]


# ---- the shipped tree, and users' files


@pytest.mark.parametrize("recipe", recipe_names())
def test_every_shipped_recipe_composes_without_a_warning(recipe):
    command = "sft" if recipe.endswith("sft") else "train"
    config, warnings = load_config([f"recipe={recipe}"], command=command)
    assert not warnings
    assert config.trainer.experiment_name == recipe


def test_the_quickstart_is_ppo_with_a_reference_on_two_tensor_parallel_ranks():
    config, _ = load_config(["recipe=quickstart"])
    assert config.uses_critic and config.uses_reference
    assert config.trainer.num_ranks == config.actor.megatron.tensor_model_parallel_size == 2
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
    assert refusal("recipe=quikstart").startswith("recipe=quikstart: did you mean quickstart? want one of gsm8k")


def test_two_recipes_are_refused():
    assert "want one recipe" in refusal("recipe=quickstart", "recipe=quickstart_grpo")


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
    assert told("rollout: {n: many}") == "/a.yaml: rollout.n=many: want an integer"
    assert "lead back" in told("recipe: ./a.yaml")
    assert "cannot be read as YAML" in told("a: [")
    assert "not a list" in told("- a")
    assert "rather than a `defaults` list" in told("defaults: [quickstart]")
    assert "cannot be read as YAML" in refusal(f"recipe={tmp_path}/absent.yaml")


def test_keys_of_a_file_that_have_no_effect_are_allowed(tmp_path):
    (tmp_path / "a.yaml").write_text("recipe: quickstart_grpo\nalgorithm: {lam: 0.9}\nsft: {epochs: 3}\n")
    assert load_config([f"recipe={tmp_path / 'a.yaml'}"])[0].algorithm.lam == 0.9


def test_a_bare_off_in_yaml_switches_the_dual_clip_off(tmp_path):
    (tmp_path / "a.yaml").write_text("actor: {clip_ratio_c: off}\n")
    assert load(f"recipe={tmp_path / 'a.yaml'}").actor.clip_ratio_c == "off"
    assert load("actor.clip_ratio_c=off").actor.clip_ratio_c == "off"
    assert load("actor.clip_ratio_c=3").actor.clip_ratio_c == 3.0


def test_composing_is_quick():
    load_config(["recipe=quickstart"])
    best = min(seconds_to_load() for _ in range(3))
    assert best < 0.5


def seconds_to_load() -> float:
    start = time.process_time()
    load_config(["recipe=quickstart", "actor.optim.lr=1e-4"])
    return time.process_time() - start


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
def test_a_key_in_the_wrong_group_is_found_by_its_last_name(key):
    guess = nearest(f"nowhere.{key.rpartition('.')[2]}")
    assert guess is not None and guess.rpartition(".")[2] == key.rpartition(".")[2]


@pytest.mark.parametrize(
    ("word", "wanted"),
    [
        ("rollout.n=many", "want an integer"),
        ("rollout.n=1.5", "want an integer"),
        ("rollout.n=null", "want an integer"),
        ("rollout.n=true", "want an integer"),
        ("actor.optim.lr=fast", "want a number"),
        ("actor.use_kl_loss=2", "want true or false"),
        ("actor.optim.betas=[a,b]", "want a list of numbers"),
        ("actor.optim.betas=0.9", "want a list of numbers"),
        ("trainer.logger=[[a]]", "want a list of texts"),
        ("trainer.total_training_steps=soon", "want an integer or null"),
        ("actor.clip_ratio_c=[1]", "want a number, text or null"),
        ("trainer.experiment_name=[a]", "want text"),
        ("actor.optim=3", "actor.optim is a group of keys; want actor.optim.NAME=VALUE"),
        ("recipe=3", "want the name of a recipe or the path of a YAML file"),
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


def test_a_single_file_or_name_stands_for_a_list_of_one():
    config = load("trainer.logger=console", "data.val_files=b.jsonl")
    assert (config.trainer.logger, config.data.val_files) == (["console"], ["b.jsonl"])


def test_a_value_may_refer_to_another_key():
    assert load("actor.optim.lr=0.25", "critic.optim.lr=${actor.optim.lr}").critic.optim.lr == 0.25
    assert "actor.optim.lr: Interpolation key 'nope.x' not found" in refusal("actor.optim.lr=${nope.x}")


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
    assert "want a multiple of the 4 data-parallel ranks" in refusal(
        "trainer.n_gpus_per_node=4", "actor.ppo_micro_batch_size=6"
    )


def test_a_typed_cut_takes_the_place_of_the_recipes():
    config, _ = load_config(["recipe=gsm8k_qwen2_5_0_5b_1gpu", "actor.ppo_max_token_len_per_gpu=4096"])
    assert cut(config.actor) == (None, None, 4096)
    assert cut(config.critic) == (None, 2, None)


def test_two_cuts_at_once_are_refused():
    told = refusal("actor.ppo_micro_batch_size=2", "actor.ppo_max_token_len_per_gpu=4096")
    assert told == (
        "actor.ppo_micro_batch_size=2 and actor.ppo_max_token_len_per_gpu=4096: want only one of them, the others null"
    )


def test_resolving_twice_changes_nothing():
    config = load("trainer.n_gpus_per_node=2", "actor.ppo_micro_batch_size=4")
    assert resolved(config) == config
    assert resolved(Config()).critic.megatron.tensor_model_parallel_size == 1


# ---- values that cannot be


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("actor.clip_ratio=1.5", "actor.clip_ratio=1.5: want a number between 0 and 1, both excluded"),
        ("actor.clip_ratio_low=0", "actor.clip_ratio_low=0.0: want a number between 0 and 1"),
        ("actor.clip_ratio_c=1", "actor.clip_ratio_c=1.0: want a number above 1, null or off"),
        ("actor.clip_ratio_c=on", "actor.clip_ratio_c=on: want a number above 1, null or off"),
        ("algorithm.gamma=1.1", "algorithm.gamma=1.1: want a number from 0 to 1"),
        ("algorithm.lam=-0.1", "algorithm.lam=-0.1: want a number from 0 to 1"),
        ("algorithm.gamma=nan", "algorithm.gamma=nan: want a number from 0 to 1"),
        ("actor.optim.lr=inf", "actor.optim.lr=inf: want a number above 0"),
        ("actor.optim.betas=[0.9]", "actor.optim.betas=[0.9]: want two numbers from 0 to below 1"),
        ("actor.optim.name=muon", "actor.optim.name=muon: want one of adamw, sgd"),
        ("rollout.temperature=0", "rollout.temperature=0.0: want a number above 0, because greedy"),
        ("rollout.top_p=0", "rollout.top_p=0.0: want a number above 0 and at most 1"),
        ("rollout.top_k=0", "rollout.top_k=0: want -1 (all tokens) or at least 1"),
        ("rollout.engine=vllm", "rollout.engine=vllm: want one of cpu"),
        ("rollout.tensor_model_parallel_size=2", "want 1, because rollout.engine=cpu is one process"),
        ("rollout.max_total_tokens=100", "want room for one sequence, at least data.max_prompt_length + data.max_re"),
        ("actor.ppo_max_token_len_per_gpu=100", "want room for one sequence"),
        ("actor.ppo_micro_batch_size_per_gpu=0", "actor.ppo_micro_batch_size_per_gpu=0: want at least 1"),
        ("actor.ppo_mini_batch_size=100", "actor.ppo_mini_batch_size=100: want a divisor of data.train_batch_size=256"),
        ("critic.ppo_mini_batch_size=100", "critic.ppo_mini_batch_size=100: want a divisor"),
        ("actor.ppo_mini_batch_size=0", "actor.ppo_mini_batch_size=0: want at least 1"),
        ("trainer.n_gpus_per_node=2 actor.megatron.tensor_model_parallel_size=4", "want a divisor of the 2 ranks"),
        ("trainer.n_gpus_per_node=2 critic.megatron.context_parallel_size=3", "critic.megatron: tensor x pipeline"),
        ("trainer.n_gpus_per_node=0", "trainer.n_gpus_per_node=0: want at least 1"),
        (
            "actor.megatron.expert_model_parallel_size=2",
            "want null or 1, because this kind of parallelism is not built",
        ),
        ("actor.megatron.virtual_pipeline_model_parallel_size=2", "want null or 1"),
        ("actor.megatron.sequence_parallel=true", "want tensor_model_parallel_size above 1, or false"),
        (
            "trainer.n_gpus_per_node=2 actor.strategy=none",
            "actor.strategy=none: want megatron, because there are 2 ranks",
        ),
        (
            "algorithm.adv_estimator=grpo",
            "rollout.n=1: algorithm.adv_estimator=grpo compares completions of one prompt",
        ),
        ("algorithm.use_kl_in_reward=true algorithm.kl_penalty=k3+", "algorithm.kl_penalty=k3+: want one of kl, k1"),
        (
            "actor.optim.lr_decay_style=linear actor.optim.min_lr=1",
            "actor.optim.min_lr=1.0: want at most actor.optim.lr",
        ),
        (
            "actor.optim.lr_decay_style=linear actor.optim.lr_decay_steps=5 actor.optim.lr_warmup_steps=5",
            "actor.optim.lr_decay_steps=5: want more than actor.optim.lr_warmup_steps=5",
        ),
        ("trainer.total_training_steps=5 trainer.critic_warmup=5", "trainer.critic_warmup=5: want fewer than"),
        ("trainer.nnodes=2 trainer.node_rank=2", "trainer.node_rank=2: want less than trainer.nnodes=2"),
        ("trainer.logger=[console,slack]", "trainer.logger=[console, slack]: slack is none of console, jsonl"),
        ("trainer.experiment_name=a/b", "trainer.experiment_name=a/b: want the plain name of a folder"),
        ("trainer.experiment_name=..", "want the plain name of a folder"),
        ("trainer.resume_mode=/nowhere", "want auto, disable or the folder of a checkpoint"),
        ("trainer.save_freq=0", "trainer.save_freq=0: want -1 (never) or at least 1"),
        ("reward.fn=bleu", "reward.fn=bleu: want one of exact, gsm8k"),
        ("reward.fn=nowhere/a.py:f", "reward.fn=nowhere/a.py:f: want a file that exists"),
    ],
)
def test_an_impossible_value_is_refused_in_one_sentence(words, told):
    assert told in refusal(*words.split())


def test_what_a_command_cannot_do_without():
    for command, words, told in (
        ("train", ["model.path=m"], "data.train_files is not set: `megarl train` wants at least one file"),
        ("train", ["data.train_files=a"], "model.path is not set: `megarl train` wants a Hugging Face folder or hub"),
        ("sft", ["model.path=m"], "sft.train_files is not set"),
        ("evaluate", ["model.path=m"], "data.val_files is not set"),
    ):
        with pytest.raises(ConfigError) as caught:
            load_config(words, command=command)
        assert told in str(caught.value)
    load_config([], command="doctor")
    load_config([], command="config")


def test_a_plug_in_may_bring_names_of_its_own():
    config = load("algorithm.plugins=[my.py]", "algorithm.policy_loss_fn=my_loss", "algorithm.adv_estimator=my_adv")
    assert config.algorithm.policy_loss_fn == "my_loss"


def test_what_is_allowed_but_hardly_meant_is_warned_about():
    def said(*words: str) -> str:
        return " ".join(load_config([*BASE, *words])[1])

    assert "rollout.top_p=0.9" in said("rollout.top_p=0.9")
    assert "rollout.top_k=5" in said("rollout.top_k=5")
    assert "counts twice" in said("actor.use_kl_loss=true", "algorithm.use_kl_in_reward=true")
    assert "want k1+ or low_var_kl" in said("actor.use_kl_loss=true", "actor.kl_loss_type=k1")
    assert not said("actor.use_kl_loss=true", "actor.kl_loss_type=k1+")


# ---- typed keys that would do nothing


@pytest.mark.parametrize(
    ("words", "because"),
    [
        ("critic.optim.lr=1 algorithm.adv_estimator=grpo", "algorithm.adv_estimator=grpo needs no critic"),
        ("trainer.critic_warmup=1 algorithm.adv_estimator=grpo", "algorithm.adv_estimator=grpo needs no critic"),
        ("algorithm.lam=0.9 algorithm.adv_estimator=grpo", "algorithm.adv_estimator=grpo scores whole completions"),
        ("algorithm.gamma=0.9 algorithm.adv_estimator=grpo", "algorithm.adv_estimator=grpo scores whole completions"),
        ("algorithm.norm_adv_by_std_in_grpo=false", "algorithm.adv_estimator=gae is not grpo"),
        (
            "ref.model.path=m",
            "actor.use_kl_loss and algorithm.use_kl_in_reward are both false, so there is no reference",
        ),
        ("actor.kl_loss_coef=0.1", "actor.use_kl_loss=false"),
        ("actor.kl_loss_type=k1", "actor.use_kl_loss=false"),
        ("actor.kl_importance=true", "actor.use_kl_loss=false"),
        ("algorithm.kl_penalty=k1", "algorithm.use_kl_in_reward=false"),
        ("algorithm.kl_ctrl.kl_coef=0.1", "algorithm.use_kl_in_reward=false"),
        ("algorithm.kl_ctrl.horizon=5 algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.type=fixed"),
        ("actor.clip_ratio=0.1 algorithm.policy_loss_fn=reinforce", "algorithm.policy_loss_fn=reinforce has no clip"),
        ("actor.clip_ratio_c=off algorithm.policy_loss_fn=reinforce", "algorithm.policy_loss_fn=reinforce has no clip"),
        (
            "actor.clip_ratio=0.1 actor.clip_ratio_low=0.2 actor.clip_ratio_high=0.3",
            "actor.clip_ratio_low and actor.clip_ratio_high are both set",
        ),
        ("actor.loss_scale_factor=5", "actor.loss_agg_mode=token-mean has no constant"),
        ("critic.loss_scale_factor=5", "critic.loss_agg_mode=token-mean has no constant"),
        ("actor.optim.momentum=0.9", "actor.optim.name=adamw has no momentum"),
        ("critic.optim.betas=[0.9,0.9] critic.optim.name=sgd", "critic.optim.name=sgd has no moments"),
        ("actor.optim.beta1=0.9 actor.optim.name=sgd", "actor.optim.name=sgd has no moments"),
        ("actor.optim.min_lr=0", "actor.optim.lr_decay_style=constant never decays"),
        ("rollout.val_kwargs.top_p=0.9 data.val_files=b", "rollout.val_kwargs.temperature=0 is greedy"),
        ("trainer.test_freq=5", "data.val_files is empty, so nothing is evaluated"),
        ("data.seed=5 data.shuffle=false", "data.shuffle=false"),
        ("trainer.total_epochs=2 trainer.total_training_steps=5", "trainer.total_training_steps=5 decides"),
        ("trainer.node_rank=0", "trainer.nnodes=1"),
        ("sft.epochs=2", "`megarl train` does not read it"),
    ],
)
def test_a_typed_key_that_would_do_nothing_is_refused(words, because):
    first = words.split()[0]
    told = refusal(*words.split(), *(["rollout.n=2"] if "grpo" in words else []))
    assert told.startswith(f"{first}: has no effect, because {because}")


def test_every_row_of_the_table_of_inert_keys_names_keys_that_exist():
    for row in TABLE:
        for pattern in row.keys.split():
            assert any(re.fullmatch(pattern.replace(".", r"\.").replace("*", ".*"), key) for key in KEYS), pattern


def test_the_commands_refuse_what_they_do_not_read():
    sft = ("sft.train_files=a",)
    assert "`megarl sft` does not read it" in refusal(*sft, "algorithm.lam=0.9", command="sft")
    assert load_config([*BASE, *sft, "sft.epochs=2", "actor.optim.lr=0.1"], command="sft")[0].sft.epochs == 2


# ---- writing and reading

DEFAULTS = resolved(Config())


@settings(max_examples=20)
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
            out += flat(value, f"{prefix}{name}.") if isinstance(value, dict) else [f"{prefix}{name}"]
        return out

    assert sorted(flat(yaml.safe_load(to_yaml(load())))) == KEYS


def test_what_is_no_configuration_is_not_read():
    for text in ("actor: {clip_ration: 1}", "actor: [", "rollout: {n: many}"):
        with pytest.raises(ConfigError, match="this is no configuration of a run"):
            from_yaml(text)


# ---- the names, and the tables they stand for


def test_the_names_are_those_of_the_tables():
    assert set(names.POLICY_LOSSES) == set(algo.POLICY_LOSSES)
    assert set(names.ADV_ESTIMATORS) == set(algo.ADV_ESTIMATORS)
    assert set(names.AGG_MODES) == set(algo.AGG_MODES)
    assert {name.removesuffix("+") for name in names.KL_ESTIMATORS} == {k.removesuffix("+") for k in algo.KL_ESTIMATORS}
    assert set(names.KL_CONTROLLERS) == set(algo.KL_CONTROLLERS)
    assert set(names.REWARDS) == set(rewards.REWARDS)
    assert set(names.ENGINES) == set(rollout.ENGINES)


def test_every_kl_estimator_is_one_the_loss_layer_computes():
    import torch

    x = torch.tensor([-1.0]), torch.tensor([-2.0])
    for name in names.KL_ESTIMATORS:
        assert algo.kl_estimate(name, *x).shape == (1,)


def test_every_checked_key_exists():
    assert {*CHOICES, *OPEN_CHOICES, *RANGES} <= set(KEYS)


def test_every_number_is_checked():
    """A new number without a range would be a hole."""
    free = {"trainer.seed", "data.seed", "rollout.seed"}
    numeric = {key for key, kind in leaf_types().items() if re.search(r"\b(int|float)\b", str(kind))}
    micro = {key for key in numeric if "micro_batch_size" in key or "max_token_len" in key}
    layout = {key for key in numeric if re.search(r"megatron\.(tensor|pipeline|context)", key)}
    assert numeric - free - micro - layout - {"rollout.max_total_tokens"} <= RANGES.keys()


def test_the_shipped_folder_is_found():
    assert (config_dir() / "train.yaml").is_file()
