"""An evaluation beside the training: when it begins and ends, what it is pinned to, and what becomes of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from megarl.trainer.evaluation.beside import Beside
from megarl.trainer.evaluation.evaluate import Evaluation


class Waited:
    """An evaluator that is ready at the third question."""

    progress = (1, 4)

    def __init__(self, story: list[Any]) -> None:
        self.story, self.questions = story, 0

    def submit(self, version: int) -> None:
        self.story.append(("submit", version))

    def ready(self) -> bool:
        self.questions += 1
        return self.questions > 2

    def take(self) -> Evaluation:
        return Evaluation([], version=7)

    def cancel(self) -> None:
        self.story.append("cancel")


def beside(story: list[Any], *, holding: bool = True) -> Beside:
    evaluator: Any = Waited(story)
    servers: Any = SimpleNamespace(version=7, watch=lambda: holding)
    return Beside(evaluator, servers, lambda step, found: story.append((step, found.version)), story.append)


def trackers(story: list[Any]) -> Any:
    return SimpleNamespace(stage=lambda name, done, total: story.append(f"{name} {done} of {total}"))


def test_it_begins_with_the_version_that_the_servers_hold_and_is_noted_at_its_step() -> None:
    story: list[Any] = []
    evaluation = beside(story)
    evaluation.begin()
    evaluation.finish(lambda: story.append("look"), trackers(story))
    assert story == [] and not evaluation.has_begun, "nothing is planned"
    evaluation.plan(7)
    evaluation.begin()
    story.append("gradient")
    evaluation.finish(lambda: story.append("look"), trackers(story))
    evaluation.finish(lambda: story.append("look"), trackers(story))
    assert story == [("submit", 7), "gradient", *["look", "testing 1 of 4"] * 2, (7, 7)]


def test_it_is_given_up_when_no_server_has_its_weights_any_more() -> None:
    story: list[Any] = []
    evaluation = beside(story, holding=False)
    evaluation.plan(7)
    evaluation.begin()
    evaluation.finish(lambda: story.append("look"), trackers(story))
    assert story[1:] == [
        "cancel",
        "the evaluation after step 7 is given up: no server holds its weights any more",
    ]
