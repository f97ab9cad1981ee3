"""The second task: right and careless reversals, and files of two tasks in one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megarl.data.examples.reversal import answer, join, write_reversals


def rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_answers_by_hand() -> None:
    assert (answer("1234"), answer("1234", careless=True)) == ("4321", "4231")
    assert answer("1225", careless=True) == answer("1225"), "where the middle digits are equal nothing shows"


def test_no_number_is_in_two_files_and_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    sizes = {"num_sft": 30, "num_train": 20, "num_test": 10}
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_reversals(tmp_path / name, seed=seed, careless=0.5, demonstrations=2, **sizes)
    files = {name: rows(tmp_path / "a" / f"{name}.jsonl") for name in ("sft", "train", "test")}
    assert [len(found) for found in files.values()] == [60, 20, 10]
    prompts = [{row["prompt"] for row in found} for found in files.values()]
    assert len(set.union(*prompts)) == sum(len(found) for found in prompts) == 60
    careless = [row["response"] == answer(row["prompt"][:-1]) for row in files["sft"]]
    assert 0.2 < sum(careless) / 60 < 0.8
    assert all(row["ground_truth"] == answer(row["prompt"][:-1]) for row in files["test"])
    assert {row["data_source"] for row in files["train"]} == {"reversal"}
    same, other = ((tmp_path / name / "sft.jsonl").read_bytes() for name in ("b", "c"))
    assert (tmp_path / "a" / "sft.jsonl").read_bytes() == same != other


def test_two_tasks_in_turn(tmp_path: Path) -> None:
    for name, count in (("a", 3), ("b", 1)):
        (tmp_path / name).mkdir()
        for file in ("sft", "train", "test"):
            (tmp_path / name / f"{file}.jsonl").write_text(
                "".join(f'{{"prompt": "{name}{i}"}}\n' for i in range(count))
            )
    join(tmp_path / "both", [tmp_path / "a", tmp_path / "b"])
    assert [row["prompt"] for row in rows(tmp_path / "both" / "train.jsonl")] == ["a0", "b0", "a1", "a2"]


@pytest.mark.parametrize("careless", [0.0, 1.0])
def test_shares_at_the_ends(tmp_path: Path, careless: float) -> None:
    write_reversals(tmp_path, careless=careless, num_sft=9, num_train=1, num_test=1)
    assert all(
        row["response"] == answer(row["prompt"][:-1], careless=careless == 1) for row in rows(tmp_path / "sft.jsonl")
    )
