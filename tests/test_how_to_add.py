"""The pages that say how to add something: their files run, and give the numbers worked out by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from agent_endpoint import Scripted, endpoint_of
from config_helpers import tables_kept
from readme_blocks import BOOK, ROOT, blocks, code_spans

from megarl.agents.chat import Chat
from megarl.agents.load import load_episode
from megarl.algo import ActorLoss, estimate, load_plugins
from megarl.batch import Batch
from megarl.rewards import load_reward
from megarl.rewards.result import to_result
from megarl.sample import Completion, Prompt, VersionSpan

PAGES = {name: text for name, text in BOOK.items() if name.startswith("how_to_add/")}


@pytest.fixture(autouse=True)
def files() -> Iterator[None]:
    """The files of the pages, saved as a reader would; what they register is gone afterwards."""
    for text in PAGES.values():
        for block in blocks(text):
            if block.file:
                Path(block.file).write_text(block.text)
    with tables_kept():
        yield


def one_token_each(old_log_probs: list[float], **rows: torch.Tensor) -> Batch:
    """Sequences of a masked token and a trainable one."""
    n = len(old_log_probs)
    mask = torch.tensor([0.0, 1.0] * n)
    old = torch.stack([torch.zeros(n), torch.tensor(old_log_probs)], dim=1).flatten()
    columns = {"response_mask": mask, "old_log_probs": old}
    return Batch(torch.zeros(2 * n, dtype=torch.int64), torch.full((n,), 2), columns, rows)


def test_the_loss_by_hand() -> None:
    load_plugins(["penalised_ratio.py"])
    batch = one_token_each([-1.0, -1.0])
    batch = batch.with_columns(weight=batch.columns["response_mask"] / 2, advantages=torch.tensor([0.0, 2.0, 0.0, 1.0]))
    log_probs = torch.tensor([0.0, -0.5, 0.0, -1.1], requires_grad=True)
    out = ActorLoss("penalised_ratio", args={"strength": 0.4})(batch, {"log_probs": log_probs})
    up, down = torch.tensor([0.5, -0.1]).exp().tolist()
    assert out.loss.item() == pytest.approx(((-2 * up + 0.2 * 0.25) + (-1 * down + 0.2 * 0.01)) / 2)
    out.loss.backward()
    assert log_probs.grad is not None
    wanted = [0.0, (-2 * up + 0.4 * 0.5) / 2, 0.0, (-1 * down + 0.4 * -0.1) / 2]
    assert log_probs.grad.tolist() == pytest.approx(wanted)
    assert out.stats["actor/moved_far"].result() == 0.5


def test_the_estimator_by_hand() -> None:
    load_plugins(["median_baseline.py"])
    scores, group = torch.tensor([1.0, 0.0, 0.5, 3.0]), torch.tensor([0, 0, 0, 1])
    batch, _ = estimate(one_token_each([0.0] * 4, score=scores, group=group), adv_estimator="median_baseline")
    assert batch.columns["advantages"].tolist() == pytest.approx([0, 0.5, 0, -0.5, 0, 0, 0, 0])
    assert batch.columns["returns"].tolist() == pytest.approx([0, 1, 0, 0, 0, 0.5, 0, 3])


@pytest.mark.parametrize(
    ("answer", "score", "right"),
    [("12 + 34 = 46", 1.0, 1.0), ("46", 0.5, 1.0), ("12 + 34 = 47", 0.0, 0.0), ("", 0.0, 0.0), ("46 or 4", 0.0, 0.0)],
)
def test_the_reward_by_hand(answer: str, score: float, right: float) -> None:
    reward = load_reward("cites_a_number.py:cites_a_number")
    completion = Completion([1], [0.0], "stop", (VersionSpan(0, 0, 1),), answer)
    found = to_result(reward(Prompt("1", [1], "12+34=", "46"), completion))
    assert (found.reward, found.extra) == (score, {"right": right, "characters": float(len(answer))})


def call(number: int) -> str:
    return f'<tool_call>{{"name": "add", "arguments": {{"number": {number}}}}}</tool_call>'


@pytest.mark.parametrize(
    ("texts", "score"),
    [
        ([call(9), call(3), "Done."], 0.9),
        ([call(12), call(6), call(6), "Done."], 0.9),  # the first is refused, and read by the model
        ([call(9), "Done."], 0.0),
    ],
)
def test_the_environment_runs_as_in_a_run(texts: list[str], score: float) -> None:
    function = load_episode("tools:reach_the_target.py:ReachTheTarget", {})

    async def episode() -> tuple[Any, str]:
        async with endpoint_of(Scripted("qwen2_5", texts), style="qwen2_5") as (endpoint, (bodies,)):
            session = endpoint.open("0-0/0")
            chat = Chat(session, [{"role": "user", "content": "Count!"}])
            found = await function.call(chat=chat, prompt=Prompt("0-0", [1], "Count!", "12"))
            return found, session.policy.text(bodies[-1]["input_ids"])

    found, seen = asyncio.run(episode())
    assert found == pytest.approx(score)
    assert "Count! Bring the counter to 12." in seen and "Adds a number to the counter." in seen
    assert ("a number from 1 to 9, please" in seen) == (call(12) in texts)


@pytest.mark.parametrize("page", PAGES)
def test_every_file_that_a_page_names_is_there(page: str) -> None:
    paths = {span.partition(" : ")[0] for span in code_spans(PAGES[page])}
    paths = {path for path in paths if path.startswith(("megarl/", "tests/", "configs/"))}
    assert len(paths) >= 2
    assert not [path for path in paths if not (ROOT / path).exists()]
