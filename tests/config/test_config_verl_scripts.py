"""Scripts of verl pasted as they are: every word is taken with its meaning, taken with a line, or refused usefully."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import yaml
from config_helpers import refusal
from verl_words import PROPERTY, SCRIPTS, Pasted, paste, says_what_happens_instead, words_of

from megarl.config import load_config
from megarl.config.keys import is_free, is_reference
from megarl.config.validate.values import value_of
from megarl.rewards import load_reward
from megarl.samples.sample import Completion, Prompt, VersionSpan

NINE_OF_TEN = 0.9
# What a script leaves out, and verl takes although an estimator of groups then has nothing to compare.
MORE = {"rloo_rollout_correction": ("rollout.n=8",)}


@cache  # what was pasted is only read
def pasted(script: str) -> Pasted:
    return paste(script, *MORE.get(script, ()))


@pytest.fixture(autouse=True)
def rewards(folder_of_the_test: None) -> None:
    """The file of rewards that one of the scripts names."""
    Path("rewards").mkdir()
    Path("rewards/gsm8k.py").write_text("def compute_score(data_source, solution_str, ground_truth): return 1.0\n")


@pytest.mark.parametrize("script", SCRIPTS)
def test_nine_of_ten_words_are_taken_and_none_is_ignored(
    script: str, record_property: Callable[[str, object], None]
) -> None:
    config, accepted, noted, refused = pasted(script)
    words = words_of(script)
    assert len(accepted) + len(noted) + len(refused) == len(words) == len(set(words))
    instead = [word for word in noted if says_what_happens_instead(word)]
    record_property(PROPERTY, (script, len(accepted), len(noted) - len(instead), len(instead), len(refused)))
    assert len(accepted) + len(noted) - len(instead) >= NINE_OF_TEN * len(words), [*instead, *refused]
    given: dict[tuple[str, object], list[object]] = {}  # two words may set one key: what is filtered out is not cut
    for word, settings in accepted.items():
        assert settings, f"{word} is taken, but sets nothing"
        for setting in settings:
            entries = setting.value if is_free(setting.key) else {None: setting.value}
            for field, value in entries.items():
                given.setdefault((setting.key, field), []).append(value)
    for (key, field), values in given.items():
        found = value_of(config, key) if field is None else value_of(config, key)[field]
        assert found in values or None in values or any(map(is_reference, values)), key
    for word, line in noted.items():
        assert len(line.partition(": ")[2]) > 10 or " has no " in line, word
    for word, sentence in refused.items():
        assert "expected" in sentence or "because" in sentence, word


def test_the_count_on_the_page_is_the_one_of_these_scripts() -> None:
    found = [pasted(script) for script in SCRIPTS]
    instead = sum(says_what_happens_instead(word) for paste in found for word in paste.noted)
    told = sum(len(paste.noted) for paste in found) - instead
    set_, refused = (sum(len(getattr(paste, name)) for paste in found) for name in ("accepted", "refused"))
    assert len(SCRIPTS) == 11
    page = " ".join((Path(__file__).parents[2] / "docs/coming_from/verl.md").read_text().split())
    assert (
        f"of {set_ + told + instead + refused} words {set_} set what they say, {told} get a line that it is so anyway, "
        f"{instead} a line of what happens instead, {refused} are refused"
    ) in page


# SCRIPT | KEY=VALUE | ...
VALUES = """
# Megatron's layout gets its sharded optimizer, its dtype, and servers of 4 on 8 GPUs
grpo_qwen2_5_7b_megatron | actor.strategy=megatron | model.dtype=bfloat16 | rollout.dtype=bfloat16
grpo_qwen2_5_7b_megatron | actor.megatron.use_distributed_optimizer=true | actor.megatron.sequence_parallel=true
grpo_qwen2_5_7b_megatron | rollout.placement=shared | rollout.num_servers=2
grpo_qwen2_5_7b_megatron | actor.loss_agg_mode=token-mean | actor.ppo_mini_batch_size=256
# FSDP shares sequences as Ulysses does, with servers of 4 on 16 machines of 8 GPUs
dapo_qwen2_5_32b | actor.strategy=fsdp | actor.megatron.context_parallel_size=8 | rollout.num_servers=32
dapo_qwen2_5_32b | actor.megatron.recompute_granularity=full | algorithm.filter_groups.metric=score
dapo_qwen2_5_32b | algorithm.overlong_buffer.enable=true | algorithm.overlong_buffer.len=4096
# the fully asynchronous trainer becomes iterations between two pushes: 4 steps of 128, of 204,800 samples
grpo_qwen3_30b_fully_async | data.train_batch_size=512 | actor.ppo_mini_batch_size=128
grpo_qwen3_30b_fully_async | trainer.total_training_steps=400 | algorithm.rollout_correction.bypass=true
grpo_qwen3_30b_fully_async | rollout.ahead=1 | rollout.placement=separate | rollout.update=in_place
# corrections of the rollout
gspo_vllm | algorithm.rollout_correction.level=token | algorithm.rollout_correction.truncate=2.0
gspo_vllm | algorithm.rollout_correction.reject_by=k1 | algorithm.rollout_correction.reject_level=sequence
rloo_rollout_correction | algorithm.policy_loss_fn=reinforce | algorithm.rollout_correction.level=sequence
rloo_rollout_correction | algorithm.rollout_correction.bypass=false
# models that score, adapters and learning rates
ppo_reward_model | reward.fn=[model] | reward.model.path=sfairXC/FsfairX-LLaMA3-RM-v0.1
grpo_lora | actor.lora.rank=64 | actor.lora.alpha=32.0 | reward.fn=['rewards/gsm8k.py:compute_score']
gspo_vllm | actor.optim.lr_decay_style=cosine
sft_gsm8k | sft.epochs=3 | sft.batch_size=256 | actor.optim.lr=0.0001
"""


@pytest.mark.parametrize("row", [line for line in VALUES.strip().splitlines() if not line.startswith("#")])
def test_a_script_becomes_a_configuration_of_these_values(row: str) -> None:
    script, *wanted = row.split(" | ")
    config = pasted(script).config
    for key, _, value in (word.partition("=") for word in wanted):
        assert value_of(config, key) == yaml.safe_load(value), key


def test_bounds_and_rates_that_are_computed_mean_the_same() -> None:
    """verl keeps a sequence whose mean of -log(ratio) lies between the logarithms of both."""
    config = pasted("gspo_vllm").config
    how = config.algorithm.rollout_correction
    assert (how.reject_low, how.reject_high) == pytest.approx((-0.01005034, 0.00995033), rel=1e-6)
    assert config.actor.optim.min_lr == pytest.approx(1e-7)


@pytest.mark.parametrize("script", ["dapo_qwen2_5_32b", "grpo_qwen3_30b_fully_async"])
@pytest.mark.parametrize("source", ["math_dapo", "aime"])  # of their two files
def test_the_rows_of_a_script_on_the_data_of_dapo_are_scored(script: str, source: str) -> None:
    (fn,) = pasted(script).config.reward.fn
    answer = Completion([1], [0.0], "stop", (VersionSpan(0, 0, 1),), "Answer: 34")
    assert load_reward(fn)(Prompt("0-0", [1], "question", "34", source), answer)["score"] == 1.0


def test_a_reward_of_lists_is_told_that_it_gets_lists_of_one() -> None:
    _, lines = load_config(["recipe=quickstart", "reward_model.reward_manager=batch"])
    assert "reward_model.reward_manager=batch: a function of lists gets each answer as a list of one" in " ".join(lines)
    assert "expected reward.fn=" in refusal("reward_model.reward_manager=mine")


def test_only_a_tensor_parallel_role_gets_sequence_parallelism() -> None:
    config = pasted("grpo_qwen3_30b_megatron").config
    sizes = (config.actor.megatron.tensor_model_parallel_size, config.ref.megatron.tensor_model_parallel_size)
    assert [size > 1 for size in sizes] == [
        config.actor.megatron.sequence_parallel, config.ref.megatron.sequence_parallel
    ]  # fmt: skip


def test_verls_defaults_are_told_and_belong_to_verls_commands_only() -> None:
    words = ["data.train_files=[a.jsonl]", "trainer.n_gpus_per_node=2"]
    own, _ = load_config([*words, "model.path=m", "actor_rollout_ref.actor.clip_ratio=0.1"])
    assert (own.rollout.placement, own.model.dtype, own.trainer.total_epochs) == ("separate", "float32", 1)
    theirs, lines = load_config([*words, "actor_rollout_ref.model.path=m"])
    assert (theirs.rollout.placement, theirs.model.dtype, theirs.trainer.total_epochs) == ("shared", "bfloat16", 30)
    assert any("trainer.total_epochs=30" in line and line.startswith("verl's defaults") for line in lines)
