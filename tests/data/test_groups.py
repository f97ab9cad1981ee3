"""Waiting groups through their files: equal to the last bit, or one clear sentence."""

from __future__ import annotations

import json
import math
import os
import struct
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from safetensors.numpy import load_file

from megarl.data import groups as module
from megarl.data.groups import FORMAT, LINES, TENSORS, load_groups, save_groups
from megarl.rollout.wire_columns import COLUMN_DTYPES
from megarl.sample import Completion, Prompt, Row, Sample, TurnSpan, VersionSpan

bits32 = st.floats(width=32)  # what an engine's float32 becomes in JSON
bits64 = st.floats()
rewards = st.floats(allow_nan=False) | st.just(math.nan)  # JSON has one NaN
extras = st.dictionaries(st.text(max_size=3), st.integers() | st.text(max_size=3) | st.binary(max_size=3), max_size=2)
kinds = st.tuples(st.sampled_from(sorted(COLUMN_DTYPES)), st.lists(st.integers(0, 3), max_size=2))


@st.composite
def samples(draw: st.DrawFn, prompt: Prompt, numbers: st.SearchStrategy[float]) -> Sample:
    owners = draw(st.lists(st.integers(0, 2), min_size=1, max_size=4))  # the row of each turn
    turns = [[turn for turn, owner in enumerate(owners) if owner == row] for row in dict.fromkeys(owners)]
    with_rewards = draw(st.booleans())
    rows = tuple(draw(rows_of(prompt, each, numbers, with_rewards)) for each in turns)
    extra = draw(st.dictionaries(st.text(max_size=3), rewards, max_size=2))
    rest = draw(st.none() | rewards), draw(st.text(max_size=5)), draw(st.booleans())
    messages = draw(st.lists(st.fixed_dictionaries({"role": st.just("tool"), "text": st.text(max_size=5)}), max_size=2))
    return Sample(prompt, rows, draw(rewards), extra, *rest, messages=messages)


@st.composite
def rows_of(
    draw: st.DrawFn, prompt: Prompt, turns: list[int], numbers: st.SearchStrategy[float], with_rewards: bool
) -> Row:
    ids = st.lists(st.integers(0, 2**31 - 1), max_size=3)
    token_ids = draw(ids | st.just(prompt.token_ids)) or [3]  # nothing predicts a row's first token
    learnt = []
    for turn in turns:
        token_ids = token_ids + draw(ids)
        start = len(token_ids)
        token_ids = token_ids + [9] + draw(ids)
        learnt.append(TurnSpan(turn, start, len(token_ids)))
    length = sum(span.end - span.start for span in learnt)
    cut = draw(st.integers(0, length))
    columns = {}
    for name in draw(st.lists(st.sampled_from(["routes", "mask", "a/b", "é"]), unique=True, max_size=3)):
        dtype, shape = draw(kinds)
        columns[name] = draw(arrays.arrays(dtype, (len(token_ids), *shape)))
    return Row(
        token_ids=token_ids,
        learnt=tuple(learnt),
        log_probs=draw(st.lists(numbers, min_size=length, max_size=length)),
        versions=(VersionSpan(3, 0, cut), VersionSpan(2**40, cut, length)),
        finish_reason=draw(st.sampled_from(["stop", "length"])),
        rewards=tuple(draw(rewards) for _ in learnt) if with_rewards else (),
        columns=columns,
    )


@st.composite
def groups_of_visits(draw: st.DrawFn) -> dict[int, list[Sample]]:
    numbers = draw(st.sampled_from([bits32, bits64]))
    found = {}
    for visit in draw(st.lists(st.integers(0, 10**12), unique=True, max_size=4)):
        text: Any = draw(st.text(max_size=5) | st.just([{"role": "user", "content": "é\n\u2028"}]))
        prompt = Prompt(
            uid=f"0-{visit}",
            token_ids=draw(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=4)),
            text=text,
            ground_truth=draw(st.none() | st.text(max_size=3)),
            data_source=draw(st.text(max_size=3)),
            extra=draw(extras),
        )
        found[visit] = draw(st.lists(samples(prompt, numbers), max_size=3))
    return found


def bits(number: float | None) -> bytes | None:
    return None if number is None else struct.pack("<d", number)


def plain(sample: Sample) -> tuple[Any, ...]:
    """All of a sample, with floats as their bits."""
    extra = [(name, bits(number)) for name, number in sample.reward_extra.items()]
    numbers = (bits(sample.reward), extra, bits(sample.greedy_reward))
    return (sample.prompt, [plain_row(row) for row in sample.rows], sample.text, sample.truncated, *numbers)


def plain_row(row: Row) -> tuple[Any, ...]:
    columns = [(name, a.dtype.name, a.shape, a.tobytes()) for name, a in row.columns.items()]
    numbers = (list(map(bits, row.log_probs)), list(map(bits, row.rewards)))
    return (row.token_ids, row.learnt, row.versions, row.finish_reason, columns, *numbers)


@settings(max_examples=40)
@given(groups_of_visits())
def test_groups_come_back_to_the_last_bit(groups: dict[int, list[Sample]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        save_groups(Path(folder), groups)
        found = load_groups(Path(folder))
    assert list(found) == list(groups)
    for visit, group in groups.items():
        assert [plain(sample) for sample in found[visit]] == [plain(sample) for sample in group]
        assert all(sample.prompt is found[visit][0].prompt for sample in found[visit]), "a group shares its prompt"


def sample(uid: str = "0-1", *, log_probs: tuple[float, ...] = (-0.5, -0.25), **columns: np.ndarray) -> Sample:
    prompt = Prompt(uid, [5, 6, 7], "12+", "3", "sums", {"level": 2})
    spans = (VersionSpan(4, 0, 1), VersionSpan(5, 1, 2))
    return Sample.of(prompt, Completion([8, 9], list(log_probs), "stop", spans, "15", columns), 1.0, {"short": 0.5})


def test_the_files_by_hand(tmp_path: Path) -> None:
    first = sample(routes=np.arange(10, dtype=np.uint8).reshape(5, 2))
    second = sample("0-2", routes=np.zeros((5, 4), np.uint8))  # of another model: another kind
    save_groups(tmp_path / "rollouts", {7: [first, first], 9: [second], 11: []})
    assert sorted(os.listdir(tmp_path / "rollouts")) == ["groups.jsonl", "groups.safetensors"]
    tensors = load_file(tmp_path / "rollouts" / TENSORS)
    assert {name: (tensor.dtype.name, tensor.shape) for name, tensor in tensors.items()} == {
        "token_ids": ("int32", (6,)),
        "log_probs": ("float32", (6,)),
        "prompt_ids": ("int32", (6,)),
        "column_0": ("uint8", (10, 2)),
        "column_1": ("uint8", (5, 4)),
    }
    first, *lines, digests = [json.loads(line) for line in (tmp_path / "rollouts" / LINES).read_text().splitlines()]
    assert first == {"format": FORMAT} and sorted(digests) == ["groups.jsonl", "groups.safetensors"]
    assert [line["visit"] for line in lines] == [7, 9, 11]
    assert lines[0]["prompt"] == {
        "uid": "0-1",
        "num_tokens": 3,
        "text": "12+",
        "ground_truth": "3",
        "data_source": "sums",
        "extra": {"level": 2},
    }
    assert lines[1]["samples"][0] == {
        "rows": [
            {
                "num_shared": 3,
                "num_tokens": 2,
                "learnt": [[0, 3, 5]],
                "versions": [[4, 0, 1], [5, 1, 2]],
                "finish_reason": "stop",
                "rewards": [],
                "columns": {"routes": "column_1"},
            }
        ],
        "text": "15",
        "reward": 1.0,
        "reward_extra": {"short": 0.5},
        "greedy_reward": None,
        "truncated": False,
        "pred": None,
        "messages": [],
    }
    assert lines[2] == {"visit": 11, "prompt": None, "samples": []}


def test_log_probs_take_8_bytes_only_where_4_would_lose_bits(tmp_path: Path) -> None:
    for log_probs, dtype in (((-0.5, -math.inf), "float32"), ((-0.5, -0.1), "float64"), ((-0.5, 1e300), "float64")):
        save_groups(tmp_path, {0: [sample(log_probs=log_probs)]})
        assert load_file(tmp_path / TENSORS)["log_probs"].dtype.name == dtype
        assert load_groups(tmp_path)[0][0].rows[0].log_probs == list(log_probs)


def test_nothing_waits(tmp_path: Path) -> None:
    save_groups(tmp_path, {})
    assert load_groups(tmp_path) == {}


def test_a_loaded_sample_holds_no_memory_of_the_others(tmp_path: Path) -> None:
    save_groups(tmp_path, {i: [sample(routes=np.zeros((5, 2)))] for i in range(3)})
    for (loaded,) in load_groups(tmp_path).values():
        assert loaded.rows[0].columns["routes"].base is None


def test_both_files_are_on_the_disk_before_the_caller_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = []
    monkeypatch.setattr(module.os, "fsync", lambda fd: synced.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name))
    save_groups(tmp_path, {0: [sample()]})
    assert synced == [TENSORS, LINES]


@pytest.mark.parametrize("name", [TENSORS, LINES])
def test_a_missing_file_is_one_sentence(tmp_path: Path, name: str) -> None:
    save_groups(tmp_path, {0: [sample()]})
    (tmp_path / name).unlink()
    with pytest.raises(ValueError, match=f"^{tmp_path}: the waiting groups cannot be read .*{name}") as error:
        load_groups(tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", [TENSORS, LINES])
def test_a_file_that_was_cut_or_changed_anywhere_is_one_sentence(tmp_path: Path, name: str) -> None:
    """Cut at every place, and one bit turned at every place; the digests stand behind the lines."""
    save_groups(tmp_path, {0: [sample(routes=np.zeros((5, 1), np.uint8))]})
    whole = (tmp_path / name).read_bytes()
    damaged = [whole[:at] for at in range(0, len(whole), 7)] + [whole + b"\n"]
    damaged += [whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in range(0, len(whole), 7)]
    for content in damaged:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=f"^{tmp_path}: .*; expected an unchanged folder$") as error:
            load_groups(tmp_path)
        assert "\n" not in str(error.value)
    (tmp_path / name).write_bytes(whole)
    assert len(load_groups(tmp_path)[0]) == 1


def test_files_of_another_format_are_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as other:
        other.setattr("megarl.data.groups.FORMAT", 1)
        save_groups(tmp_path, {0: [sample()]})
    with pytest.raises(ValueError, match=f"another format; expected format {FORMAT}: resume with that version"):
        load_groups(tmp_path)


def test_files_of_two_saves_do_not_go_together(tmp_path: Path) -> None:
    for folder, log_prob in (("one", -0.5), ("other", -0.25)):
        save_groups(tmp_path / folder, {0: [sample(log_probs=(log_prob, 0.0))]})
    (tmp_path / "other" / TENSORS).replace(tmp_path / "one" / TENSORS)
    with pytest.raises(ValueError, match="is damaged"):
        load_groups(tmp_path / "one")


def test_a_field_that_no_file_can_hold_is_named_with_its_prompt(tmp_path: Path) -> None:
    given = Sample(Prompt("0-17", [1], "x", extra={"image": object()}), sample().rows, 1.0)
    with pytest.raises(ValueError, match=r"^prompt 0-17: a field of its row cannot be saved, it holds a object; expe"):
        save_groups(tmp_path, {0: [given]})


def test_a_group_has_one_prompt(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="visit 3 has samples of several prompts"):
        save_groups(tmp_path, {3: [sample("0-1"), sample("0-2")]})
