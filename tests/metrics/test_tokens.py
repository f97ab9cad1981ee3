"""tokens.jsonl: which samples, and the numbers of each token, worked out by hand."""

from __future__ import annotations

from pathlib import Path

import torch

from megarl.data.batch import make_batch
from megarl.metrics import tokens
from megarl.metrics.jsonl import read_lines
from megarl.metrics.tokens import TOKENS, TokenLog
from megarl.sample import Completion, Prompt, Row, Sample, TurnSpan, VersionSpan


def decode(ids: list[int]) -> str:
    return "".join(chr(token) for token in ids)


def ids(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def plain(uid: str, answer: str, reward: float) -> Sample:
    spans = (VersionSpan(7, 0, 1), VersionSpan(8, 1, len(answer)))
    return Sample.of(
        Prompt(uid, ids("q:"), "q:"), Completion(ids(answer), [-0.25] * len(answer), "stop", spans), reward
    )


def with_tool(uid: str) -> Sample:
    """q: | ab | tool | c"""
    learnt = (TurnSpan(0, 2, 4), TurnSpan(1, 8, 9))
    row = Row(ids("q:abtoolc"), learnt, [-1.0, -2.0, -3.0], (VersionSpan(7, 0, 3),), "stop")
    return Sample(Prompt(uid, ids("q:"), "q:"), (row,), 0.5)


def written(folder: Path, groups: list[list[Sample]], num_samples: int) -> list[dict[str, object]]:
    batch = make_batch(groups)
    places = torch.arange(batch.num_tokens, dtype=torch.float32)
    batch = batch.with_columns(old_log_probs=-places, advantages=places / 3)
    TokenLog(folder, decode, num_samples).write(4, groups, batch)
    return list(read_lines(folder / TOKENS))


def test_the_best_and_the_worst_of_a_group_are_kept_with_the_numbers_of_their_own_tokens(tmp_path: Path) -> None:
    group = [plain("0-1", "xyz", 0.5), plain("0-1", "no", 0.0), plain("0-1", "yes", 1.0)]
    best, worst = written(tmp_path, [group, [plain("0-2", "other", 1.0)]], 2)
    assert (best["step"], best["uid"], best["reward"], worst["reward"]) == (4, "0-1", 1.0, 0.0)
    assert worst["rows"] == [
        [
            {"text": "q:"},  # tokens 5 and 6 of the batch: the first sample has 5
            {"version": 7, "pieces": ["n"], "rollout_log_probs": [-0.25], "log_probs": [-7.0], "advantages": [2.3333]},
            {"version": 8, "pieces": ["o"], "rollout_log_probs": [-0.25], "log_probs": [-8.0], "advantages": [2.6667]},
        ]
    ]


def test_what_a_tool_said_is_context_between_the_turns(tmp_path: Path) -> None:
    (row,) = written(tmp_path, [[with_tool("0-1")]], 2)
    question, first, tool, second = row["rows"][0]  # type: ignore[index]
    assert (question, tool) == ({"text": "q:"}, {"text": "tool"})
    assert (first["pieces"], first["rollout_log_probs"]) == (["a", "b"], [-1.0, -2.0])
    assert (second["pieces"], second["rollout_log_probs"], second["log_probs"]) == (["c"], [-3.0], [-8.0])


def test_long_samples_are_cut_and_say_so(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(tokens, "MAX_TOKENS", 3)
    monkeypatch.setattr(tokens, "MAX_CONTEXT", 2)
    (row,) = written(tmp_path, [[plain("0-1", "abcdef", 1.0)]], 1)
    _, first, second, left_out = row["rows"][0]  # type: ignore[index]
    assert (first["pieces"], second["pieces"], left_out) == (["a"], ["b", "c"], {"text": "[... 3 tokens ...]"})
    monkeypatch.setattr(tokens, "MAX_TOKENS", 9)
    row = written(tmp_path, [[with_tool("0-1")]], 1)[-1]
    assert row["rows"][0][2] == {"text": "t\n[... 2 tokens ...]\nl"}  # type: ignore[index]


def test_a_step_that_trained_nothing_writes_nothing(tmp_path: Path) -> None:
    TokenLog(tmp_path, decode, 2).write(1, [], None)
    assert not (tmp_path / TOKENS).exists()
