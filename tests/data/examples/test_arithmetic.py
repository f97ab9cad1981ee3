import hashlib
import json
import sys

import pytest

from megarl.data.examples import arithmetic
from megarl.data.examples.arithmetic import has_carry, without_carry, write_task


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_three_files_are_disjoint_complete_and_right(tmp_path):
    write_task(tmp_path)
    sft, train, test = (rows(tmp_path / name) for name in ("sft.jsonl", "train.jsonl", "test.jsonl"))
    assert (len(sft), len(train), len(test)) == (2700, 5144, 256)
    answers = {row["prompt"]: row["response"] for row in sft}
    answers |= {row["prompt"]: row["ground_truth"] for row in train + test}
    assert len(answers) == 8100
    assert answers["12+34="] == "46"
    assert answers["99+99="] == "198"
    for prompt, answer in answers.items():
        a, b = prompt.removesuffix("=").split("+")
        assert int(a) + int(b) == int(answer)
    assert {row["data_source"] for row in train + test} == {"arithmetic"}


def test_it_is_the_same_for_a_seed_and_different_for_another(tmp_path):
    same = [write_task(tmp_path / str(i), seed=seed) for i, seed in enumerate((0, 0, 1))]
    assert same[0] == same[1]
    assert same[0]["files"]["test.jsonl"] != same[2]["files"]["test.jsonl"]


def test_the_manifest_describes_the_files(tmp_path):
    manifest = write_task(tmp_path, num_sft=5, num_test=3, low=1, high=4)
    assert json.loads((tmp_path / "manifest.json").read_text()) == manifest
    assert {name: entry["rows"] for name, entry in manifest["files"].items()} == {
        "sft.jsonl": 5,
        "train.jsonl": 8,
        "test.jsonl": 3,
    }
    for name, entry in manifest["files"].items():
        assert hashlib.sha256((tmp_path / name).read_bytes()).hexdigest() == entry["sha256"]


def test_impossible_sizes_are_refused(tmp_path):
    with pytest.raises(ValueError, match="num_sft=3 and num_test=1: expected a sum below the 4 pairs there are"):
        write_task(tmp_path, num_sft=3, num_test=1, low=1, high=2)
    with pytest.raises(ValueError, match="carrying=0: expected a share above 0"):
        write_task(tmp_path, carrying=0)


def test_a_careless_teacher_forgets_the_carry_in_its_share_of_demonstrations(tmp_path):
    assert [without_carry(a, b) for a, b in ((17, 25), (12, 34), (99, 99), (55, 45))] == [32, 46, 188, 90]
    write_task(tmp_path, num_sft=1000, careless=0.6, demonstrations=2)
    shown = rows(tmp_path / "sft.jsonl")
    assert len(shown) == 2000
    assert len({row["prompt"] for row in shown}) == 1000
    forgot = right = 0
    for row in shown:
        a, b = map(int, row["prompt"].removesuffix("=").split("+"))
        answer = int(row["response"])
        if not has_carry(a, b):
            assert answer == a + b
        elif answer == a + b:
            right += 1
        else:
            assert answer == a + b - 10
            forgot += 1
    assert forgot / (forgot + right) == pytest.approx(0.6, abs=0.05)  # 900 coins: three standard deviations
    for row in rows(tmp_path / "train.jsonl")[:100]:
        a, b = map(int, row["prompt"].removesuffix("=").split("+"))
        assert int(row["ground_truth"]) == a + b, "the reward knows better"


def test_the_share_of_carries_can_be_chosen(tmp_path):
    write_task(tmp_path, num_sft=0, num_test=0, carrying=0.75)
    carries = [has_carry(*map(int, row["prompt"][:-1].split("+"))) for row in rows(tmp_path / "train.jsonl")]
    assert sum(carries) == 3645, "all there are: 81 pairs of tens and 45 of units"
    assert len(carries) == 4860


def test_the_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["arithmetic", str(tmp_path), "--num-sft", "10", "--num-test", "20"])
    arithmetic.main()
    assert "sft.jsonl 10, train.jsonl 8070, test.jsonl 20" in " ".join(capsys.readouterr().out.split())
