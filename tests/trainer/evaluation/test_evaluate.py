"""Who is asked for the completions of an evaluation, and who looks after the servers meanwhile."""

from __future__ import annotations

import hashlib
import json
import subprocess
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.config import Config, resolved
from megarl.metrics.evaluation.audit import Audit
from megarl.metrics.evaluation.evaluation import Mean
from megarl.metrics.jsonl import append_lines, read_lines
from megarl.sample import Completion, LostRollout, Prompt, Sample, VersionSpan
from megarl.servers.supervisor import ServerDied, ServerEvent, State
from megarl.trainer.evaluation import evaluate
from megarl.trainer.evaluation.evaluate import Evaluation, Evaluator, look_after, read_audit
from megarl.trainer.evaluation.record import weights_of

PROMPTS = SimpleNamespace(all=lambda _: ["a prompt"], some=lambda _: [], sets=lambda _: ["sums"], questions=[])
A, B, ROUTER = "http://a:1", "http://b:1", "http://router:1"


class Router:
    url = ROUTER

    def __init__(self) -> None:
        self.working: list[str] = []

    def add(self, url: str) -> None:
        self.working.append(url)

    def remove(self, url: str) -> None:
        self.working.remove(url)


class Servers:
    """They tell of one event after another."""

    urls = [A, B]

    def __init__(self, *events: ServerEvent) -> None:
        self._events = list(events)
        self.states = [State.SERVING, State.SERVING]

    def poll(self) -> list[ServerEvent]:
        if not self._events:
            return []
        event = self._events.pop(0)
        self.states[event.index] = event.state
        return [event]


class Stopped(Exception):
    """Far enough."""


@pytest.mark.parametrize("router", [None, Router()])
def test_completions_are_asked_of_the_router_where_there_is_one(
    router: Router | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    class Infrastructure:
        server_token, reward_url = "token", None

        def __init__(self, config: Config, *, trains: bool) -> None:
            assert not trains, "the GPUs are the servers'"
            self.router = router

        def __enter__(self) -> Infrastructure:
            return self

        def __exit__(self, *_: object) -> None: ...

        def serve(self) -> Servers:
            return Servers()

    def make_collectors(config: Config, urls: list[str], token: str, *, reward_url: str | None) -> None:
        asked.extend(urls)
        raise Stopped

    monkeypatch.setattr(evaluate, "Infrastructure", Infrastructure)
    monkeypatch.setattr(evaluate, "make_collectors", make_collectors)
    monkeypatch.setattr(evaluate, "read_prompts", lambda *_, **__: PROMPTS)
    config = Config()
    config.data.val_files, config.reward.try_rows, config.model.path = ["a.jsonl"], 0, str(tmp_path)
    with pytest.raises(Stopped):
        evaluate.main(config)
    assert asked == ([A, B] if router is None else [ROUTER])
    if router is not None:
        assert router.working == [A, B]


def test_the_servers_are_looked_after_while_their_completions_are_awaited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    waits, looks, how = [], [], {}
    (sample,) = samples("0", 0.5)
    ticket = SimpleNamespace(group=None)

    def wait() -> None:
        waits.append("waited")
        if len(waits) == 3:
            ticket.group = [sample]

    def submit(prompts: list[str], **options: Any) -> list[Any]:
        how.update(options)
        return [ticket]

    collectors = SimpleNamespace(submit=submit, wait=wait, close=lambda: None)
    infrastructure = nullcontext(SimpleNamespace(serve=Servers, router=None, server_token="token", reward_url=None))
    monkeypatch.setattr(evaluate, "Infrastructure", lambda *_, **__: infrastructure)
    monkeypatch.setattr(evaluate, "make_collectors", lambda *_, **__: collectors)
    monkeypatch.setattr(evaluate, "read_prompts", lambda *_, **__: PROMPTS)
    monkeypatch.setattr(evaluate, "look_after", lambda servers, router: looks.append(servers.urls))
    config = resolved(Config())
    config.data.val_files, config.reward.try_rows, config.model.path = ["a.jsonl"], 0, str(tmp_path)
    config.trainer.default_local_dir = str(tmp_path / "runs")
    assert evaluate.main(config) == 0
    assert looks == [[A, B]] * 2
    assert how["urgent"], "in a run nothing that is generated ahead may come before it"
    said = capsys.readouterr().out
    assert "val/score 0.5000" in said and "val-core/sums/reward/mean@1 0.5000" in said
    assert "val/version" not in said, "the servers have but one version"
    assert "accuracy" not in said, "a reward of 0.5 is neither right nor wrong"


def evaluated(found: list[Any], config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """`megarl evaluate`, of which the servers' answers are given."""
    collectors = SimpleNamespace(
        submit=lambda prompts, **_: [SimpleNamespace(group=group) for group in found], wait=None, close=lambda: None
    )
    infrastructure = nullcontext(SimpleNamespace(serve=Servers, router=None, server_token="token", reward_url=None))
    prompts = SimpleNamespace(
        all=lambda _: ["a prompt"] * len(found), some=lambda _: [], sets=lambda _: ["a"] * len(found), questions=[]
    )
    monkeypatch.setattr(evaluate, "Infrastructure", lambda *_, **__: infrastructure)
    monkeypatch.setattr(evaluate, "make_collectors", lambda *_, **__: collectors)
    monkeypatch.setattr(evaluate, "read_prompts", lambda *_, **__: prompts)
    assert evaluate.main(config) == 0


def test_an_evaluation_leaves_its_numbers_its_answers_and_what_the_weights_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").write_bytes(b"weights")
    (model / "config.json").write_text("{}")
    config = resolved(Config())
    config.data.val_files, config.reward.try_rows, config.model.path = ["a.jsonl"], 0, str(model)
    config.trainer.default_local_dir, config.trainer.experiment_name = str(tmp_path), "try"
    (tmp_path / "try").mkdir()
    (tmp_path / "try" / "summary.json").write_text("of the training")
    lost = LostRollout(Prompt("2", [1], ""), "no server")
    evaluated([samples("0", 1.0), samples("1", 1.0), lost], config, monkeypatch)
    folder = tmp_path / "try" / "evaluations" / "1"
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["accuracy"] == summary["score"] == pytest.approx(2 / 3)
    assert summary["accuracy_stderr"] == summary["score_stderr"] == pytest.approx(1 / 3)
    assert (summary["prompts"], summary["metrics"]["val/lost"]) == (3, 1.0)
    listed = subprocess.run(["sha256sum", "model.safetensors"], cwd=model, capture_output=True, check=True).stdout
    weights = summary["weights"]
    assert (weights["folder"], weights["sha256"]) == (str(model), hashlib.sha256(listed).hexdigest())
    of_file = {"bytes": 7, "sha256": hashlib.sha256(b"weights").hexdigest()}
    assert weights["files"] == {"model.safetensors": of_file}
    (line,) = read_lines(folder / "evaluations.jsonl")
    assert [prompt["reward"] for prompt in line["prompts"]] == [[1.0], [1.0], [0.0]]
    assert [row["uid"] for row in read_lines(folder / "answers.jsonl")] == ["0", "1"]
    said = capsys.readouterr().out
    assert "accuracy 0.6667" in said and said.endswith(f"results: {folder}\n")

    evaluated([samples("0", 0.0)], config, monkeypatch)
    again = json.loads((folder.with_name("2") / "summary.json").read_text())
    assert (again["score"], again["accuracy"]) == (0.0, 0.0), "of a reward that is right or wrong"
    assert json.loads((folder / "summary.json").read_text()) == summary, "the first one stays"
    assert (tmp_path / "try" / "summary.json").read_text() == "of the training"


def test_weights_that_others_loaded_are_not_vouched_for(tmp_path: Path) -> None:
    config = resolved(Config())
    config.rollout.urls, config.model.path = [A], str(tmp_path)
    assert weights_of(config) == {"model": str(tmp_path), "servers": [A]}


def test_a_server_that_died_gets_no_work_until_it_is_back_and_without_any_it_ends() -> None:
    router: Any = Router()
    router.working = [A, B]
    servers: Any = Servers(
        ServerEvent(0, A, State.RESTING, 1, "it ended"),
        ServerEvent(0, A, State.SERVING, 2),
        ServerEvent(1, B, State.OUT, 3, "after 3 restarts, it ended"),
        ServerEvent(0, A, State.OUT, 4, "after 3 restarts, it broke"),
    )
    states = []
    for _ in range(3):
        look_after(servers, router)
        states.append(sorted(router.working))
    assert states == [[B], [A, B], [A]]
    with pytest.raises(ServerDied, match="no server is left; after 3 restarts, it broke"):
        look_after(servers, None)


def samples(uid: str, *rewards: float, version: int = 0) -> list[Sample]:
    prompt, completion = Prompt(uid, [1], ""), Completion([1], [-1.0], "stop", (VersionSpan(version, 0, 1),))
    return [Sample.of(prompt, completion, reward) for reward in rewards]


def test_what_could_not_be_scored_is_counted_and_is_no_zero_in_the_score() -> None:
    unscored = LostRollout(Prompt("2", [1], ""), "2 of 2 completions could not be scored", unscored=2)
    found = Evaluation([samples("0", 1.0, 0.0), samples("1", 1.0), unscored], n=2)
    counted = {"val/unscored": 3.0, "val/lost": 0.0}
    assert found.metrics() == {"val/score": 0.75, "val/score_stderr": pytest.approx(0.25), **counted}
    assert found.is_share
    lost = LostRollout(Prompt("3", [1], ""), "no server")
    more = Evaluation([*found.groups, lost], n=2, sets=["a", "a", "a", "b"])
    metrics = more.metrics()
    assert (metrics["val/score"], metrics["val/unscored"], metrics["val/lost"]) == (0.5, 3.0, 1.0)
    assert metrics["val-core/a/reward/mean@2"] == 0.75 and metrics["val-core/b/reward/mean@2"] == 0.0
    shaped = Evaluation([samples("0", 0.5), samples("1", 1.0)])
    assert not shaped.is_share and shaped.accuracy is None, "the mean of such rewards is a score, and no accuracy"
    right = [[replace(s, reward_extra={"acc": float(s.reward == 1)}) for s in group] for group in shaped.groups]
    assert Evaluation([*right, lost]).accuracy == Mean.of([0.0, 1.0, 0.0])


def answered(uid: str, *extras: dict[str, float]) -> list[Sample]:
    """Samples with these extra numbers, of which a right one has the reward 1."""
    return [
        replace(sample, reward=extra.get("acc", 0.0), reward_extra=extra)
        for extra, sample in zip(extras, samples(uid, *(0.0 for _ in extras)), strict=True)
    ]


def test_lost_prompts_count_as_wrong_in_the_accuracy_of_their_set() -> None:
    right = [answered(f"{number}", {"acc": 1.0, "words": 3.0}) for number in range(5)]
    lost = [LostRollout(Prompt(f"{number}", [1], ""), "no server") for number in range(5, 10)]
    found = Evaluation([*right, *lost], sets=["s"] * 10)
    metrics = found.metrics()
    assert metrics["val/score"] == metrics["val-core/s/acc/mean@1"] == 0.5
    assert metrics["val-aux/s/acc/mean@1/stderr"] == pytest.approx(1 / 6), "sqrt(0.5 * 0.5 / 9)"
    assert metrics["val-aux/s/words/mean@1"] == 3.0, "a number that says nothing of right and wrong has no zeros"
    assert found.accuracy is not None and found.accuracy.value == 0.5
    assert [prompt.get("acc") for prompt in found.line(1)["prompts"]] == [[1.0]] * 5 + [[0.0]] * 5


@pytest.mark.parametrize("name", ["acc", "mine/acc"])
def test_answers_whose_reward_failed_and_counted_as_0_are_wrong(name: str) -> None:
    group = answered("0", {"acc": 1.0}, *[{"reward_error": 1.0}] * 3)
    group[0] = replace(group[0], reward_extra={name: 1.0})
    found = Evaluation([group], n=4, sets=["s"])
    metrics = {metric.partition("/s/")[2] or metric: value for metric, value in found.metrics().items()}
    assert metrics["val/score"] == metrics[f"{name}/mean@4"] == 0.25
    assert metrics[f"{name}/best@2/mean"] == pytest.approx(1 - 0.75**2)
    assert metrics[f"{name}/pass@2"] == pytest.approx(0.5), "1 - C(3, 2) / C(4, 2)"
    assert metrics["reward_error/mean@4"] == 0.75, "a share of all answers"
    assert found.accuracy is not None and found.accuracy.value == 0.25


def test_an_accuracy_of_sets_with_and_without_acc_goes_by_what_each_has() -> None:
    groups = [answered("0", {"acc": 1.0}), answered("1", {}), samples("2", 1.0), samples("3", 0.0), samples("4", 1.0)]
    unscored = LostRollout(Prompt("5", [1], ""), "1 of 1 completions could not be scored", unscored=1)
    found = Evaluation([*groups, unscored], sets=["a", "a", "b", "b", "b", "a"])
    assert found.accuracy is not None and found.accuracy.value == 3 / 5
    assert found.metrics()["val-core/a/acc/mean@1"] == 0.5, "the one that could not be scored does not count"


def test_answers_on_which_the_audit_failed_are_counted() -> None:
    lost = LostRollout(Prompt("2", [1], ""), "no server")
    groups = [answered("0", {"audit": 1.0}, {"audit_error": 1.0}), answered("1", *[{"audit_error": 1.0}] * 2), lost]
    found = Evaluation(groups, n=2, sets=["s"] * 3)
    metrics = found.metrics()
    assert found.audits == (3, 4) and metrics["audit/failed"] == 3.0
    assert metrics["val-aux/s/audit/mean@2"] == 1.0, "of the one that has a number"
    assert "audit/failed" not in Evaluation([answered("0", {})]).metrics()


class Answering:
    """Collectors whose servers hold a version each; they answer the prompts in turn."""

    def __init__(self, *versions: int) -> None:
        self.versions, self.asked = list(versions), 0

    def submit(self, prompts: list[Prompt], **_: Any) -> list[Any]:
        self.asked += len(prompts)
        return [SimpleNamespace(group=samples(prompt.uid, 1.0, version=self.versions.pop(0))) for prompt in prompts]

    def wait(self) -> None: ...


def evaluator_of(*versions: int) -> tuple[Evaluator, Answering]:
    collectors: Any = Answering(*versions)
    prompts = [Prompt(str(number), [1], "") for number in range(2)]
    return Evaluator(collectors, prompts, resolved(Config()), ["sums", "sums"]), collectors


def test_an_evaluation_is_of_one_version_and_what_others_wrote_is_asked_again() -> None:
    evaluator, collectors = evaluator_of(7, 6, 7)
    evaluator.submit(version=7)
    assert [evaluator.ready(), evaluator.ready()] == [False, True]
    found = evaluator.take()
    assert collectors.asked == 3 and found.version == 7
    assert {span.version for group in found.groups for sample in group for span in sample.versions} == {7}
    line = found.line(7)
    assert (line["step"], line["version"], line["n"]) == (7, 7, 1)
    assert line["prompts"] == [{"uid": uid, "set": "sums", "reward": [1.0]} for uid in ("0", "1")]


def test_servers_that_stay_with_other_weights_end_the_evaluation_with_an_error() -> None:
    evaluator, _ = evaluator_of(7, 6, 6, 6)
    evaluator.submit(version=7)
    assert not evaluator.ready() and not evaluator.ready()
    with pytest.raises(RuntimeError, match="version 7 got replies that version 6 wrote, 3 times"):
        evaluator.ready()


def test_without_a_version_all_replies_are_of_the_oldest_one() -> None:
    evaluator, _ = evaluator_of(3, 3)
    evaluator.submit()
    assert evaluator.ready() and evaluator.take().version == 3


def test_the_audit_of_a_run_that_resumes_is_that_of_its_file(tmp_path: Path) -> None:
    def evaluation(step: int) -> Evaluation:
        """The reward of every second prompt is 1 at first, and of all later; the audit stays."""
        groups: list[Any] = []
        for number in range(40):
            (one,) = samples(str(number), 1.0 if step or number % 2 else 0.0)
            groups.append([replace(one, reward_extra={"audit": float(number % 2)})])
        return Evaluation(groups, sets=["sums"] * 40, version=step)

    audit, file = Audit(), tmp_path / "evaluations.jsonl"
    assert read_audit(file) == audit
    for step in range(3):
        found = audit.look(evaluation(step).audited())
        append_lines(file, [evaluation(step).line(step)])
    assert read_audit(file) == audit
    assert found["audit/parted"] == 1.0 and found["audit/promised_gain"] == 0.5
    assert evaluation(2).metrics()["val-aux/sums/audit/mean@1"] == 0.5
