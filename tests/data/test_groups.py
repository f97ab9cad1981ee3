"""Waiting groups through their files: equal to the last bit, or one clear sentence; values of rows in JSON."""

import json
import math
import os
import tempfile
from dataclasses import replace
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from safetensors.numpy import load_file
from several_rows import groups_of_rows

from megarl.data import groups as module
from megarl.data.groups import (
    FORMAT,
    KIND,
    LINES,
    TENSORS,
    check_writable,
    from_json,
    load_groups,
    save_groups,
    to_json,
)
from megarl.rollout.wire_columns import COLUMN_DTYPES
from megarl.samples.sample import Completion, Prompt, Sample, VersionSpan

# What an engine's float32 becomes in JSON, any float64; JSON has one NaN, so rewards have no other.
NUMBERS: dict[str, st.SearchStrategy[float]] = {"float32": st.floats(width=32), "float64": st.floats()}
rewards = st.floats(allow_nan=False) | st.just(math.nan)
kinds = st.tuples(st.sampled_from(sorted(COLUMN_DTYPES)), st.lists(st.integers(0, 3), max_size=2))
words = st.text(max_size=4)


@st.composite
def groups_of_visits(draw: st.DrawFn) -> dict[int, list[Sample]]:
    """Groups of samples with one to three rows, every number, text and column of which is drawn anew."""
    numbers, seed = NUMBERS[draw(st.sampled_from(sorted(NUMBERS)))], draw(st.integers(0, 10**6))
    visits = draw(st.lists(st.integers(0, 10**12), unique=True, max_size=4))
    groups = groups_of_rows(seed, len(visits), n=3, rewards=draw(st.booleans()), vocab_size=2**31 - 1)
    found = {}
    for visit, group in zip(visits, groups, strict=True):
        extra = draw(st.dictionaries(words, st.integers() | words | st.binary(max_size=3), max_size=2))
        text: Any = draw(words | st.just([{"role": "user", "content": "é\n\u2028"}]))
        prompt = replace(
            group[0].prompt,
            text=text,
            ground_truth=draw(st.none() | words | st.floats(0, 1) | st.lists(words)),
            extra=extra,
        )
        found[visit] = [draw(redrawn(prompt, sample, numbers)) for sample in group[: draw(st.integers(0, 3))]]
    return found


@st.composite
def redrawn(draw: st.DrawFn, prompt: Prompt, sample: Sample, numbers: st.SearchStrategy[float]) -> Sample:
    rows = []
    for row in sample.rows:
        columns = {}
        for name in draw(st.lists(st.sampled_from(["routes", "mask", "a/b", "é"]), unique=True, max_size=3)):
            dtype, shape = draw(kinds)
            columns[name] = draw(arrays.arrays(dtype, (len(row.token_ids), *shape)))
        log_probs, of_turns = [draw(numbers) for _ in row.log_probs], tuple(draw(rewards) for _ in row.rewards)
        rows.append(replace(row, log_probs=log_probs, rewards=of_turns, columns=columns))
    of_reward = draw(rewards), draw(st.dictionaries(words, rewards, max_size=2)), draw(st.none() | rewards)
    messages = draw(st.lists(st.fixed_dictionaries({"role": st.just("tool"), "text": words}), max_size=2))
    return Sample(prompt, tuple(rows), *of_reward, draw(words), sample.truncated, messages=messages)


def plain(sample: Sample) -> tuple[Any, ...]:
    """All of a sample: Python writes a float such that it comes back to the last bit."""
    columns = [(name, a.dtype.name, a.shape, a.tobytes()) for row in sample.rows for name, a in row.columns.items()]
    return repr(replace(sample, rows=tuple(replace(row, columns={}) for row in sample.rows))), columns


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
    assert lines[0]["prompt"].keys() == {"uid", "num_tokens", "text", "ground_truth", "data_source", "extra"}
    (of_sample,) = lines[1]["samples"]
    names = {"rows", "text", "reward", "reward_extra", "greedy_reward", "truncated", "pred", "messages"}
    assert of_sample.keys() == names, "with another one the format has another number"
    (row,) = of_sample["rows"]
    found = {"num_shared": 3, "num_tokens": 2, "learnt": [[0, 3, 5]], "versions": [[4, 0, 1], [5, 1, 2]]}
    assert row == found | {"finish_reason": "stop", "rewards": [], "columns": {"routes": "column_1"}}
    assert lines[2] == {"visit": 11, "prompt": None, "samples": []}


def test_log_probs_take_8_bytes_only_where_4_would_lose_bits(tmp_path: Path) -> None:
    for log_probs, dtype in (((-0.5, -math.inf), "float32"), ((-0.5, -0.1), "float64"), ((-0.5, 1e300), "float64")):
        save_groups(tmp_path, {0: [sample(log_probs=log_probs)]})
        assert load_file(tmp_path / TENSORS)["log_probs"].dtype.name == dtype


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
def test_a_file_that_was_cut_or_changed_anywhere_is_one_sentence(tmp_path: Path, name: str) -> None:
    """Cut at every place, one bit turned at every place, and no file; the digests stand behind the lines."""
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
    (tmp_path / name).unlink()
    with pytest.raises(ValueError, match=f"^{tmp_path}: the waiting groups cannot be read .*{name}"):
        load_groups(tmp_path)


def test_files_of_another_format_are_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as other:
        other.setattr("megarl.data.groups.FORMAT", 1)
        save_groups(tmp_path, {0: [sample()]})
    with pytest.raises(ValueError, match=f"another format; expected format {FORMAT}: resume with that version"):
        load_groups(tmp_path)


def test_a_field_that_no_file_can_hold_is_named_with_its_prompt(tmp_path: Path) -> None:
    given = Sample(Prompt("0-17", [1], "x", extra={"image": object()}), sample().rows, 1.0)
    with pytest.raises(ValueError, match=r"^prompt 0-17: a field of its row cannot be saved, it holds a object; expe"):
        save_groups(tmp_path, {0: [given]})


def test_a_group_has_one_prompt(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="visit 3 has samples of several prompts"):
        save_groups(tmp_path, {3: [sample("0-1"), sample("0-2")]})


text = st.text(max_size=4) | st.just(KIND)
of_json = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | text
times = st.datetimes() | st.datetimes(timezones=st.just(UTC)) | st.times()
others = times.map(lambda t: t.replace(fold=0))  # no file of data says which of the two hours at the end of summer
others |= st.binary(max_size=6) | st.dates() | st.timedeltas() | st.decimals(allow_nan=False)
keys = text | st.integers() | st.dates()


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    few = st.lists(inner, max_size=3)
    return few | few.map(tuple) | st.dictionaries(keys, inner, max_size=3)


def same(one: Any, other: Any) -> bool:
    """Equal with all types: 1, 1.0 and True are three values."""
    if type(one) is not type(other):
        return False
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return same(list(one.items()), list(other.items()))
    return repr(one) == repr(other)


@given(st.recursive(of_json | others, containers, max_leaves=8))
def test_any_value_comes_back(value: Any) -> None:
    assert same(from_json(json.loads(json.dumps(to_json(value)))), value)


@given(st.recursive(of_json | others | st.just({1, 2}) | st.just(1j), containers, max_leaves=8))
def test_what_cannot_be_written_is_known_without_writing_it(value: Any) -> None:
    told = []
    for function in (to_json, check_writable):
        try:
            function(value)
            told.append(None)
        except TypeError as error:
            told.append(str(error))
    assert told[0] == told[1]


def test_what_json_has_is_written_as_it_is() -> None:
    value = {"a": [1, 2.5, "x", None, True], "b": {"c": []}}
    assert to_json(value) == value


def test_other_kinds_by_hand() -> None:
    assert to_json({"when": date(2025, 1, 31)}) == {"when": {KIND: ["date", "2025-01-31"]}}
    assert to_json((b"\x00\x01", Decimal("1.10"))) == {
        KIND: ["tuple", [{KIND: ["bytes", "AAE="]}, {KIND: ["decimal", "1.10"]}]]
    }
    assert to_json({1: "a"}) == {KIND: ["pairs", [[1, "a"]]]}
    assert to_json({KIND: 3}) == {KIND: ["pairs", [[KIND, 3]]]}
    assert to_json(timedelta(1, 2, 3)) == {KIND: ["timedelta", [1, 2, 3]]}
    assert to_json([time(1, 2), datetime(2025, 1, 31, 1)]) == [
        {KIND: ["time", "01:02:00"]},
        {KIND: ["datetime", "2025-01-31T01:00:00"]},
    ]


def test_a_type_that_no_row_has_is_named() -> None:
    with pytest.raises(TypeError, match="^a complex; expected text, numbers"):
        to_json({"a": [1j]})
