"""The keys of agents: their defaults, what contradicts them, and what has no effect."""

from pathlib import Path

import pytest
from config_helpers import load, refusal

from megarl.agents.adapters import ADAPTERS
from megarl.agents.answer import TOOL_PARSERS
from megarl.agents.conversation import HISTORIES
from megarl.config import names

FILE = "agent.fn=agent.py:episode"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "agent.py").write_text("async def episode(chat, prompt): ...\n")
    monkeypatch.chdir(tmp_path)


def test_the_names_are_those_of_the_tables() -> None:
    assert set(names.TOOL_PARSERS) == set(TOOL_PARSERS)
    assert names.AGENT_HISTORIES == HISTORIES
    assert set(names.AGENT_ADAPTERS) == set(ADAPTERS)


def test_an_episode_has_as_many_tokens_as_a_completion_unless_it_is_said(here: None) -> None:
    lengths = ["data.max_prompt_length=100", "data.max_response_length=50"]
    assert load(*lengths).agent.max_tokens == 150
    config = load(*lengths, FILE, "agent.max_tokens=30000")
    assert config.longest == ("agent.max_tokens", 30000)
    assert config.actor.ppo_max_token_len_per_gpu == 30000, "an episode fits into a micro-batch"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("agent.fn=gone.py:episode", "agent.fn=gone.py:episode: expected a file that exists"),
        ("agent.fn=agent.py", "agent.fn=agent.py: expected path/to/file.py:function, package.module:function"),
        (f"{FILE} agent.command=[a]", "agent.command=[a]: expected [], because agent.fn=agent.py:episode is the agent"),
        (f"{FILE} agent.max_tokens=1024", "agent.max_tokens=1024: expected more than data.max_prompt_length=1024"),
        (
            f"{FILE} agent.max_tokens=3000 actor.ppo_max_token_len_per_gpu=2000",
            "actor.ppo_max_token_len_per_gpu=2000: expected room for one sequence, at least agent.max_tokens = 3000",
        ),
        (f"{FILE} agent.history=edited", "agent.history=edited: expected one of generated, rendered"),
        (f"{FILE} agent.tool_parser=xml", "agent.tool_parser=xml: expected one of hermes, none"),
        (f"{FILE} agent.on_error=ignore", "agent.on_error=ignore: expected one of unscored, zero, stop"),
        (f"{FILE} agent.timeout_s=0", "agent.timeout_s=0.0: expected a number above 0"),
        (f"{FILE} trainer.check_export=true data.val_files=[v]", "trainer.check_export=true: expected false"),
        (
            f"{FILE} algorithm.overlong_buffer.enable=true algorithm.overlong_buffer.len=9",
            "algorithm.overlong_buffer.enable=true: expected false",
        ),
        ("agent.max_turns=3", "agent.max_turns=3: has no effect, because agent.fn=null and agent.command=[]"),
        ("agent.command=[a] agent.args={b:1}", "agent.args={b:1}: has no effect, because agent.command has no"),
    ],
)
def test_what_cannot_be_is_told_in_one_sentence(here: None, words: str, told: str) -> None:
    assert told in refusal(*words.split())
