"""The examples with environments of other libraries: each plays an episode to its reward, with the stock package."""

import asyncio
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_endpoint import Scripted, endpoint_of
from agent_episodes import PARAMS, stage_of
from chat_templates import tokenizer_of

from megarl.agents.adapters.verifiers import WORKER, load
from megarl.data.examples.tiny import tiny_tokenizer
from megarl.data.prompts import Prompts, RowSettings
from megarl.samples.sample import Prompt

TESTS = Path(__file__).parents[1]
EXAMPLES = TESTS.parent / "examples/environments"


def play(words: list[str], *texts: str) -> tuple[float, str]:
    """The reward of an episode of an example, and what the model read and wrote."""
    python = os.environ["MEGARL_ENVIRONMENTS_PYTHON"]
    prompt = Prompt("0-17", [5, 6], "Be lucky.", extra={"seed": 3})

    async def episode() -> tuple[float, str]:
        async with stage_of([python, str(EXAMPLES / words[0]), *words[1:]], *texts) as stage:
            (sample,) = await stage.episodes.group(prompt, 1, PARAMS)
            (row,) = sample.rows
            return sample.reward, tokenizer_of("qwen3").decode(row.token_ids)

    return asyncio.run(episode())


@pytest.fixture
def server() -> Iterator[str]:
    """The address of a server of openenv-core, which ends with the test."""
    command = [os.environ["MEGARL_ENVIRONMENTS_PYTHON"], "-m", "uvicorn", "--port", "0"]
    command += ["--app-dir", str(TESTS / "helpers"), "openenv_server:app"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            lines = iter(process.stderr.readline, "")
            yield next(found[0] for line in lines if (found := re.search(r"http://127\.0\.0\.1:\d+", line)))
        finally:
            process.terminate()


@pytest.mark.agents
def test_a_game_on_a_server_of_openenv(server: str) -> None:
    reward, said = play(["with_openenv.py", server, "{seed}"], "9", "4")
    assert reward == 1.0
    heard = ["Guess my number, from 1 to 9.", "9", "It is lower.", "4"]
    assert re.findall(r"<\|im_start\|>\w+\n(.*)<\|im_end\|>", said) == heard


@pytest.mark.agents
def test_a_game_of_textarena() -> None:
    reward, said = play(["with_textarena.py", "GuessTheNumber-v0-raw", "{seed}"], "I say [20].", "[7]", "[8]")
    assert reward == 1.0
    heard = ["I say [20].", "The target number is lower.", "[7]", "The target number is higher.", "[8]"]
    assert re.findall(r"\n(.*)<\|im_end\|>", said)[1:] == heard


@pytest.mark.agents
def test_blackjack_of_gymnasium() -> None:
    reward, said = play(["with_gymnasium.py", "{prompt}", "{seed}"], "Hit!", "Stick.")
    assert reward == -1.0
    assert said.startswith("<|im_start|>system\nBe lucky.<|im_end|>")
    state = "You have %s, the dealer shows 10. Hit or stick?"
    assert re.findall(r"\n(.*)<\|im_end\|>", said)[1:] == [state % 7, "Hit!", state % 17, "Stick."]


@pytest.mark.agents
def test_a_taskset_of_verifiers() -> None:
    python = os.environ["MEGARL_VERIFIERS_PYTHON"]
    shutil.copy(EXAMPLES / "with_verifiers.py", ".")
    command = [python, "-P", str(WORKER), "with_verifiers", "--rows", "1"]
    Path("tasks.jsonl").write_bytes(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    (prompt,) = Prompts("tasks.jsonl", tiny_tokenizer(), RowSettings(64, shuffle=False)).all()

    async def episode() -> tuple[dict[str, float], str]:
        async with endpoint_of(Scripted("qwen2_5", ["27"]), style="qwen2_5") as (endpoint, _):
            session = endpoint.open("0-0/0")
            reward = await load("with_verifiers", {"python": python})(endpoint.url_of(session) + "/v1", prompt)
            (row,) = session.conversation.rows()
            return reward, session.policy.text(row.token_ids)

    reward, said = asyncio.run(episode())
    assert reward == {"right": 1.0, "score": 1.0}
    assert "10+17=" in said


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.py")), ids=lambda file: file.name)
def test_an_example_has_at_most_25_lines(file: Path) -> None:
    assert len(file.read_text().splitlines()) <= 25
