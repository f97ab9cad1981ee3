"""Scripts of verl pasted as they are: every word is taken with its meaning, taken with a line, or refused usefully."""

from collections.abc import Callable
from pathlib import Path

import pytest
from config_helpers import refusal
from verl_words import PROPERTY, SCRIPTS, paste, says_what_happens_instead, words_of

from megarl.config import load_config
from megarl.config.keys import FREE, is_reference
from megarl.config.validate.values import value_of
from megarl.rewards import load_reward
from megarl.sample import Completion, Prompt, VersionSpan

NINE_OF_TEN = 0.9
# What a script leaves out, and verl takes although an estimator of groups then has nothing to compare.
MORE = {"rloo_rollout_correction": ("rollout.n=8",)}


@pytest.fixture(autouse=True)
def rewards(folder_of_the_test: None) -> None:
    """The file of rewards that one of the scripts names."""
    Path("rewards").mkdir()
    Path("rewards/gsm8k.py").write_text("def compute_score(data_source, solution_str, ground_truth): return 1.0\n")


@pytest.mark.parametrize("script", SCRIPTS)
def test_nine_of_ten_words_are_taken_and_none_is_ignored(
    script: str, record_property: Callable[[str, object], None]
) -> None:
    config, accepted, noted, refused = paste(script, *MORE.get(script, ()))
    words = words_of(script)
    assert len(accepted) + len(noted) + len(refused) == len(words) == len(set(words))
    instead = [word for word in noted if says_what_happens_instead(word)]
    record_property(PROPERTY, (script, len(accepted), len(noted) - len(instead), len(instead), len(refused)))
    assert len(accepted) + len(noted) - len(instead) >= NINE_OF_TEN * len(words), [*instead, *refused]
    given: dict[tuple[str, object], list[object]] = {}  # two words may set one key: what is filtered out is not cut
    for word, settings in accepted.items():
        assert settings, f"{word} is taken, but sets nothing"
        for setting in settings:
            field = setting.place if setting.key in FREE else None
            given.setdefault((setting.key, field), []).append(setting.value)
    for (key, field), values in given.items():
        found = value_of(config, key) if field is None else value_of(config, key)[field]
        assert found in values or None in values or any(map(is_reference, values)), key
    for word, line in noted.items():
        assert len(line.partition(": ")[2]) > 10 or " has no " in line, word
    for word, sentence in refused.items():
        assert "expected" in sentence or "because" in sentence, word


def test_hundreds_of_words_over_ten_scripts_are_tried() -> None:
    assert len(SCRIPTS) >= 10
    assert sum(len(words_of(script)) for script in SCRIPTS) > 600


def test_a_script_that_lays_out_megatron_gets_its_sharded_optimizer_its_dtype_and_servers_on_all_gpus() -> None:
    config = paste("grpo_qwen2_5_7b_megatron").config
    assert (config.actor.strategy, config.model.dtype, config.rollout.dtype) == ("megatron", "bfloat16", "bfloat16")
    assert config.actor.megatron.use_distributed_optimizer and config.actor.megatron.sequence_parallel
    assert (config.rollout.placement, config.rollout.num_servers) == ("shared", 2)  # 8 GPUs, 4 for each
    assert config.actor.loss_agg_mode == "token-mean" and config.actor.ppo_mini_batch_size == 256


def test_a_script_of_fsdp_shards_by_fsdp_and_shares_sequences_as_ulysses_does() -> None:
    config = paste("dapo_qwen2_5_32b").config
    assert (config.actor.strategy, config.actor.megatron.context_parallel_size) == ("fsdp", 8)
    assert config.rollout.num_servers == 32  # 16 machines of 8 GPUs, 4 for each
    assert config.actor.megatron.recompute_granularity == "full"
    assert (config.algorithm.overlong_buffer.enable, config.algorithm.overlong_buffer.len) == (True, 4096)
    assert config.algorithm.filter_groups.metric == "score"


@pytest.mark.parametrize("script", ["dapo_qwen2_5_32b", "grpo_qwen3_30b_fully_async"])
@pytest.mark.parametrize("source", ["math_dapo", "aime"])  # of their two files
def test_the_rows_of_a_script_on_the_data_of_dapo_are_scored(script: str, source: str) -> None:
    (fn,) = paste(script).config.reward.fn
    answer = Completion([1], [0.0], "stop", (VersionSpan(0, 0, 1),), "Answer: 34")
    assert load_reward(fn)(Prompt("0-0", [1], "question", "34", source), answer)["score"] == 1.0


def test_a_reward_of_lists_is_told_that_it_gets_lists_of_one() -> None:
    _, lines = load_config(["recipe=quickstart", "reward_model.reward_manager=batch"])
    assert "reward_model.reward_manager=batch: a function of lists gets each answer as a list of one" in " ".join(lines)
    assert "expected reward.fn=" in refusal("reward_model.reward_manager=mine")


def test_only_a_tensor_parallel_role_gets_sequence_parallelism() -> None:
    config = paste("grpo_qwen3_30b_megatron").config
    sizes = (config.actor.megatron.tensor_model_parallel_size, config.ref.megatron.tensor_model_parallel_size)
    assert [size > 1 for size in sizes] == [
        config.actor.megatron.sequence_parallel, config.ref.megatron.sequence_parallel
    ]  # fmt: skip


def test_the_fully_asynchronous_trainer_becomes_iterations_between_two_pushes() -> None:
    config = paste("grpo_qwen3_30b_fully_async").config
    assert (config.data.train_batch_size, config.actor.ppo_mini_batch_size) == (4 * 128, 128)
    assert config.trainer.total_training_steps == 204800 // 512
    assert (config.rollout.ahead, config.rollout.placement, config.rollout.update) == (1, "separate", "in_place")
    assert config.algorithm.rollout_correction.bypass


def test_corrections_of_the_rollout_mean_the_same() -> None:
    how = paste("gspo_vllm").config.algorithm.rollout_correction
    assert (how.level, how.truncate, how.reject_by, how.reject_level) == ("token", 2.0, "k1", "sequence")
    # verl keeps a sequence whose mean of -log(ratio) lies between the logarithms of both
    assert (how.reject_low, how.reject_high) == pytest.approx((-0.01005034, 0.00995033), rel=1e-6)
    pure = paste("rloo_rollout_correction", *MORE["rloo_rollout_correction"]).config.algorithm
    assert (pure.policy_loss_fn, pure.rollout_correction.level, pure.rollout_correction.bypass) == (
        *("reinforce", "sequence"), False
    )  # fmt: skip


def test_models_that_score_adapters_and_learning_rates_mean_the_same() -> None:
    scored = paste("ppo_reward_model").config
    assert (scored.reward.fn, scored.reward.model.path) == (["model"], "sfairXC/FsfairX-LLaMA3-RM-v0.1")
    adapted = paste("grpo_lora").config
    assert (adapted.actor.lora.rank, adapted.actor.lora.alpha) == (64, 32.0)
    assert adapted.reward.fn == ["rewards/gsm8k.py:compute_score"]
    decayed = paste("gspo_vllm").config.actor.optim
    assert (decayed.lr_decay_style, decayed.min_lr) == ("cosine", pytest.approx(1e-7))
    taught = paste("sft_gsm8k").config
    assert (taught.sft.epochs, taught.sft.batch_size, taught.actor.optim.lr) == (3, 256, 1e-4)


def test_verls_defaults_are_told_and_belong_to_verls_commands_only() -> None:
    words = ["data.train_files=[a.jsonl]", "trainer.n_gpus_per_node=2"]
    own, _ = load_config([*words, "model.path=m", "actor_rollout_ref.actor.clip_ratio=0.1"])
    assert (own.rollout.placement, own.model.dtype, own.trainer.total_epochs) == ("separate", "float32", 1)
    theirs, lines = load_config([*words, "actor_rollout_ref.model.path=m"])
    assert (theirs.rollout.placement, theirs.model.dtype, theirs.trainer.total_epochs) == ("shared", "bfloat16", 30)
    assert any("trainer.total_epochs=30" in line and line.startswith("verl's defaults") for line in lines)


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("hybrid_engine=3", "expected true or false"),
        ("reward_model.enable=maybe", "expected true or false"),
        ("async_training.staleness_threshold=inf", "expected a number"),
        ("actor.optim.min_lr_ratio=[1]", "expected a number"),
    ],
)
def test_a_value_that_a_rule_cannot_read_is_refused(word: str, told: str) -> None:
    assert refusal(word) == f"{word}: {told}"
