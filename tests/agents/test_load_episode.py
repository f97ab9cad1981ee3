"""How an episode is called follows from the names of its parameters."""

from pathlib import Path

import pytest

from megarl.agents.load import CHAT, ENDPOINT, PROCESS, absolute_address, load_episode, without_prefix

FILE = """
async def by_chat(chat, prompt, tries=1): ...
async def by_url(base_url, prompt): ...
async def by_key(base_url, api_key, prompt): ...
def plain(base_url, api_key, prompt): ...
def blocking(chat, prompt): ...
async def other(messages): ...
class Agent:
    async def __call__(self, chat, prompt): ...
agent = Agent()
"""


@pytest.fixture
def path(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(FILE)
    return str(tmp_path / "mine.py")


def test_the_parameters_decide(path: str) -> None:
    found = {name: load_episode(f"{path}:{name}", {}) for name in ("by_chat", "by_url", "by_key", "plain", "agent")}
    assert {name: (each.way, each.wants_key) for name, each in found.items()} == {
        "by_chat": (CHAT, False),
        "by_url": (ENDPOINT, False),
        "by_key": (ENDPOINT, True),
        "plain": (PROCESS, True),
        "agent": (CHAT, False),
    }


@pytest.mark.parametrize(
    ("name", "arguments", "told"),
    [
        ("gone", {}, "has no function 'gone'; it has by_chat, by_url, by_key, plain, blocking, other"),
        ("other", {}, "it takes (messages); expected async def episode(chat, prompt), "),
        ("blocking", {}, "a function with the parameter chat has to be `async def`"),
        ("by_chat", {"turns": 3}, "got an unexpected keyword argument 'turns'"),
    ],
)
def test_what_cannot_be_called_is_told_in_one_sentence(path: str, name: str, arguments: dict, told: str) -> None:
    with pytest.raises(ValueError, match="agent.fn=") as caught:
        load_episode(f"{path}:{name}", arguments)
    assert told in str(caught.value) and "\n" not in str(caught.value)


def test_an_address_is_valid_in_any_folder(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(path).parent)
    assert absolute_address("mine.py:plain") == f"{path}:plain"
    assert absolute_address("package.module:run") == "package.module:run"
    assert without_prefix("mine.py:plain") == "mine.py:plain"
