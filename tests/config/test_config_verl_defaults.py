"""Every word of verl's trainers with its default value changes nothing, and no word with another value is dropped."""

from dataclasses import asdict
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml

from megarl.config import load_config
from megarl.config.aliases import RENAMED, _pattern, converted, without_prefix
from megarl.config.settings import Faults, _layer, from_command_line
from megarl.config.verl.runs import in_sft_places, sft_place
from megarl.config.verl.taken import Command, Taken, asks

FILE = Path(__file__).parents[1] / "fixtures/verl_defaults.txt"
ROWS = [line.split(" | ", 1) for line in FILE.read_text().splitlines() if not line.startswith("#")]
TRAINERS = ("fsdp", "megatron", "async", "sft", "sft_megatron")

# What a command cannot do without, and what makes each trainer that one.
RL = (
    "data.train_files=[a.parquet]",
    "data.val_files=[b.parquet]",
    "actor_rollout_ref.model.path=m",
    "actor_rollout_ref.rollout.name=sglang",
)
SFT = ("data.train_files=[a.parquet]", "data.val_files=[b.parquet]", "model.path=m")
COMMANDS = {
    "fsdp": RL,
    "megatron": (*RL, "model_engine=megatron"),
    "async": (*RL, "--config-name=fully_async_ppo_trainer"),
    "sft": SFT,
    "sft_megatron": (*SFT, "engine=megatron"),
}
# Files are the command's own, and of the asynchronous trainer's two places of a word the other one counts.
OWN = ("data.train_files", "data.val_files", "model.path", "actor_rollout_ref.model.path", "critic.model.path")
OF_THE_OTHER_PLACE = ("actor_rollout_ref.rollout.nnodes", "actor_rollout_ref.rollout.n_gpus_per_node", "rollout.n")
# Keys that a default of verl sets to another value than the command has without it: names, places and seeds; null
# where a number is the default; and what changes time and memory only.
MAY_CHANGE = {
    *("trainer.project_name", "trainer.experiment_name", "trainer.logger", "trainer.default_local_dir"),
    *("trainer.seed", "data.seed", "rollout.seed", "trainer.device"),
    *("actor.clip_ratio", "actor.clip_ratio_low", "actor.clip_ratio_high", "actor.clip_ratio_c"),
    *(f"{role}.megatron.expert_model_parallel_size" for role in ("actor", "critic", "ref")),
    *("algorithm.policy_loss_fn", "algorithm.filter_groups.metric", "algorithm.filter_groups.max_num_gen_batches"),
    "agent.tool_parser",  # verl always reads Hermes' form; ours, the one that the chat template writes
    *("rollout.bucket_bytes", "reward.num_workers", "trainer.async_save", "trainer.share_prefixes"),
    *("actor.ppo_max_token_len_per_gpu", "critic.ppo_max_token_len_per_gpu", "ref.ppo_max_token_len_per_gpu"),
}


DISTILS = [f"distillation.distillation_loss.{word}" for word in ("loss_mode=k1", "use_policy_gradient=true")]
TOGETHER_WITH = {"fsdp": "megatron", "async": "fsdp", "sft_megatron": "sft"}  # whose words are tried there


def words_of(trainer: str) -> list[str]:
    skipped = (*OWN, *(OF_THE_OTHER_PLACE if trainer == "async" else ()))
    rows = [(trainers.split(), word) for trainers, word in ROWS if word.partition("=")[0] not in skipped]
    return [word for trainers, word in rows if trainer in trainers and TOGETHER_WITH.get(trainer) not in trainers]


def command_of(trainer: str) -> str:
    return "sft" if trainer.startswith("sft") else "train"


def leaves(group: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in group.items():
        found |= leaves(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return found


def test_all_words_of_five_trainers_are_tried() -> None:
    counts = {trainer: sum(trainer in trainers.split() for trainers, _ in ROWS) for trainer in TRAINERS}
    assert counts == {"fsdp": 914, "megatron": 962, "async": 930, "sft": 193, "sft_megatron": 218}


@pytest.mark.parametrize("trainer", TRAINERS)
def test_the_defaults_of_verl_written_out_change_nothing(trainer: str) -> None:
    before, _ = load_config([*COMMANDS[trainer]], command=command_of(trainer))
    after, _ = load_config([*COMMANDS[trainer], *words_of(trainer)], command=command_of(trainer))
    old, new = leaves(asdict(before)), leaves(asdict(after))
    changed = {key: (old.get(key), new.get(key)) for key in old.keys() | new.keys() if old.get(key) != new.get(key)}
    assert changed.keys() <= MAY_CHANGE, {key: both for key, both in changed.items() if key not in MAY_CHANGE}


def flipped(value: Any) -> Any:
    """A value that asks for something else than the default does."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return 2 * value + 3
    return "some/path" if isinstance(value, str) or not value else value[1:]


@pytest.mark.parametrize("is_sft", [False, True])
def test_another_value_than_the_default_sets_something_or_is_told_or_is_refused(is_sft: bool) -> None:
    """And only a rule that names a word drops it where its value is true, above 1, or a path."""
    tried = 0
    for trainers, word in ROWS:
        if trainers.startswith("sft") != is_sft:
            continue
        name, _, default = word.partition("=")
        typed, value = without_prefix(name), flipped(yaml.safe_load(default))
        command = Command({typed: value}, is_whole=True, is_sft=is_sft)
        key = sft_place(typed, command) if is_sft else typed
        command = command._replace(words=in_sft_places(command) if is_sft else command.words)
        taken = converted(key, value, command)
        tried += 1
        if taken is None:  # our own key, or none at all, which is refused
            continue
        assert taken.settings or taken.note or taken.refusal, f"{typed}={value} is dropped without a line"
        if asks(value) and not taken.settings and not taken.refusal:
            pattern = _pattern(key, is_sft)
            assert pattern is not None and "*" not in pattern.rpartition(".")[2], f"{typed}={value}: {taken.note}"
    assert tried > 200


BASE = (("actor_rollout_ref.model.path", "m"), ("trainer.total_training_steps", 100))


def taken_in_order(*words: tuple[str, Any]) -> dict[tuple[str, Any], Any] | None:
    """What a whole command with these words sets, in the order of its settings; None if it is refused."""
    written = [(f"{key}={value}", key, value) for key, value in (*BASE, *words)]
    layer = _layer(written, Faults())
    return None if layer.faults else {(each.key, each.place): each.value for each in layer.settings}


def test_two_words_that_set_one_key_do_not_depend_on_their_order() -> None:
    """An entry of a list is set after the list, so that the order of the settings is compared too."""
    names = {without_prefix(word.partition("=")[0]) for trainers, word in ROWS if not trainers.startswith("sft")}
    setters: dict[str, list[tuple[str, Any]]] = {}
    for name in sorted(names | RENAMED.keys()):
        for value in (None, 3):
            for key, _ in taken_in_order((name, value)) or {}:
                setters.setdefault(key, []).append((name, value))
    for key in ("model.path", "trainer.total_training_steps"):
        del setters[key]
    several = {key: words for key, words in setters.items() if len({name for name, _ in words}) > 1}
    pairs = {pair for words in several.values() for pair in combinations(words, 2) if pair[0][0] != pair[1][0]}
    assert len(pairs) > 100
    for first, second in pairs:
        assert taken_in_order(first, second) == taken_in_order(second, first), (first, second)


@pytest.mark.parametrize("is_sft", [False, True])
def test_a_switch_reads_every_spelling_of_true_and_false_or_refuses_it(is_sft: bool) -> None:
    """A word of verl with one of these defaults is a switch: 1, yes and on mean what true does."""
    switches = {
        without_prefix(word.partition("=")[0])
        for trainers, word in ROWS
        if trainers.startswith("sft") == is_sft and word.partition("=")[2].lower() in ("true", "false")
    }
    spellings = {True: (1, "1", "yes", "on", "True"), False: (0, "0", "no", "off", "False")}
    for key in sorted(switches):
        for plain, others in spellings.items():
            meant = taken_as(key, plain, is_sft)
            for other in others:
                if other == 1 and meant is not None and "expected it left out" in meant.refusal:
                    continue  # no rule names the word, and 1 may be a size
                found = taken_as(key, other, is_sft)
                assert found is None or found.refusal or found == meant, f"{key}={other}"


def taken_as(typed: str, value: Any, is_sft: bool) -> Taken | None:
    """What becomes of a switch; None for a key that ours takes, which has its own check."""
    command = Command({typed: value}, is_whole=True, is_sft=is_sft)
    key = sft_place(typed, command) if is_sft else typed
    taken = converted(key, value, command._replace(words={key: value}))
    return None if taken is None or taken.settings == ((key, value),) else taken


@pytest.mark.parametrize("value", ["1", "yes", "on", "True"])
def test_what_a_switch_decides_for_other_words_does_not_depend_on_its_spelling(value: str) -> None:
    switches = {
        "distillation.enabled": ["distillation.teacher_models.one.model_path=t", *DISTILS],
        "algorithm.rollout_correction.bypass_mode": ["algorithm.rollout_correction.loss_type=reinforce"],
        "reward_model.enable": ["reward_model.model.path=r"],
        "actor.use_dynamic_bsz": ["actor.ppo_micro_batch_size_per_gpu=4"],
    }
    for switch, words in switches.items():
        true, other = (from_command_line([*RL, f"{switch}={spelt}", *words]) for spelt in ("true", value))
        assert [(each.key, each.value) for each in other.settings] == [(each.key, each.value) for each in true.settings]
        assert not other.faults and other.settings, switch


@pytest.mark.parametrize(
    "word",
    [
        "actor_rollout_ref.actor.fsdp_config.new_switch=true",
        "actor_rollout_ref.actor.fsdp_config.new_group.size=8",
        "actor_rollout_ref.rollout.engine_kwargs.vllm.logits_processors=[a/b.py]",
        "transfer_queue.new_size=2",
        "ray_kwargs.new=a/path",
        "critic.fsdp.new_switch=true",
    ],
)
def test_a_group_that_has_no_meaning_here_drops_no_word_that_asks_for_something(word: str) -> None:
    (fault,) = from_command_line([*RL, word]).faults
    assert fault.startswith(f"{word}: expected it left out: nothing here does what it asks for")
    key, _, _ = word.partition("=")
    layer = from_command_line([*RL, f"{key}=false"])
    assert not layer.faults and any(line.startswith(f"{without_prefix(key)}=false: ") for line in layer.warnings)


@pytest.mark.parametrize("value", [True, "abc", [], ["x"], -3, 0.5, 1e400, None])
@pytest.mark.parametrize("is_sft", [False, True])
def test_no_rule_fails_on_a_value_of_another_type(is_sft: bool, value: Any) -> None:
    for _, word in ROWS:
        typed = without_prefix(word.partition("=")[0])
        command = Command({typed: value, "data.train_files": "a"}, is_whole=True, is_sft=is_sft)
        converted(sft_place(typed, command) if is_sft else typed, value, command)


def test_what_asks_for_something_is_true_above_one_or_a_path() -> None:
    asking = yaml.safe_load("[true, 2, 1.5, a/b, [0, 2], 'yes', 'on']")
    assert all(map(asks, asking))
    assert not any(map(asks, yaml.safe_load("[false, null, 0, 1, -1, '', name, [], {}]")))
