"""How a conversation is written for a reward model; tests/servers/test_contract_scores.py asks real ones."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_server import write_tokenizer
from transformers import AutoTokenizer

from megarl.rewards.services.limit import Limit, ServiceError
from megarl.rewards.services.model import RewardModel, _score
from megarl.sample import Completion, Prompt, VersionSpan

TEMPLATE = "{% for m in messages %}{{ '?' if m.role == 'user' else '=' }}{{ m.content }}{% endfor %}"
ANSWER = Completion([1], [0.0], "stop", (VersionSpan(0, 0, 1),), "46")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tokenizer(tmp_path)
    return tmp_path


def written(folder: Path, text: str | list[dict[str, str]]) -> str:
    ids = RewardModel(str(folder), "http://h", limit=Limit()).token_ids(Prompt("0-0", [1], text), ANSWER)
    return str(AutoTokenizer.from_pretrained(folder).decode(ids))


def test_its_own_template_writes_the_conversation(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    assert written(folder, "12+34") == "?12+34=46"
    messages = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]
    assert written(folder, [*messages, {"role": "user", "content": "12+34"}]) == "?1+1=2?12+34=46"


def test_without_a_template_question_and_answer_are_joined(folder: Path) -> None:
    assert written(folder, "12+34=") == "12+34=46"


def test_a_reply_without_a_score_is_told() -> None:
    assert _score({"embedding": [0.5, 1.0]}) == 0.5
    for reply in ([], {"embedding": []}, {"embedding": None}, "no"):
        with pytest.raises(ServiceError, match="the reward model's reply has no score"):
            _score(reply)
