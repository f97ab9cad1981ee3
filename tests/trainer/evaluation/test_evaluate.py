"""Who is asked for the completions of an evaluation, and who looks after the servers meanwhile."""

import hashlib
import json
import subprocess
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from run_logs import run_log

from megarl.config import Config, resolved
from megarl.metrics.computing.audit import Audit
from megarl.metrics.computing.evaluation import Mean, cut_off
from megarl.metrics.reading.jsonl import append_lines, read_lines
from megarl.rewards.result import to_result
from megarl.samples.sample import Completion, LostRollout, Prompt, Sample, VersionSpan
from megarl.servers.supervisor import ServerDied, ServerEvent, State
from megarl.trainer.checks import reward_trial
from megarl.trainer.checks.rewards import chosen_rewards, say_chosen
from megarl.trainer.evaluation import command
from megarl.trainer.evaluation.command import look_after, weights_of
from megarl.trainer.evaluation.evaluate import Evaluation, Evaluator, read_audit
from megarl.trainer.evaluation.in_training import Evaluations

ROW = Prompt("eval-0", [1], "1+1=", "2")
PROMPTS = SimpleNamespace(all=lambda _: [ROW], some=lambda _: [], sets=lambda _: ["sums"], questions=[])
PROMPTS.left_out, PROMPTS.num_cut, PROMPTS.tools_said = lambda _: 0, 0, ""
A, B, ROUTER = "http://a:1", "http://b:1", "http://router:1"


def router_of(*working: str) -> Any:
    """A router that works with these servers."""
    urls = list(working)
    return SimpleNamespace(url=ROUTER, working=urls, add=urls.append, remove=urls.remove)


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


def evaluated(
    config: Config, patch: pytest.MonkeyPatch, collectors: Any, prompts: Any = PROMPTS, router: Any = None
) -> list[str]:
    """`megarl evaluate` with these collectors; returns who is asked."""
    asked: list[str] = []
    told: dict[str, Any] = {url: {"attn_dp_size": 2} for url in (A, B)}
    parts = SimpleNamespace(
        serve=Servers, router=router, server_token="token", reward_url=None, ask_servers=lambda: told
    )

    def infrastructure(config: Config, *, trains: bool) -> Any:
        assert not trains, "the GPUs are the servers'"
        return nullcontext(parts)

    patch.setattr(command, "Infrastructure", infrastructure)
    patch.setattr(command, "make_collectors", lambda _, urls, *args, **how: asked.extend(urls) or collectors)
    patch.setattr(reward_trial, "read_prompts", lambda *_, **__: prompts)
    assert command.main(config) == 0
    return asked


@pytest.fixture
def config(tmp_path: Path) -> Config:
    found = resolved(Config())
    found.data.val_files, found.reward.try_rows, found.model.path = ["a.jsonl"], 0, str(tmp_path)
    found.trainer.default_local_dir, found.trainer.experiment_name = str(tmp_path / "runs"), "try"
    return found


def answering(*found: Any) -> Any:
    return SimpleNamespace(
        submit=lambda prompts, **_: [SimpleNamespace(group=group) for group in found], wait=None, close=lambda: None
    )


@pytest.mark.parametrize("router", [None, router_of()])
def test_completions_are_asked_of_servers_or_their_router_which_are_looked_after_while_they_are_awaited(
    config: Config, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], router: Any
) -> None:
    looks: list[list[str]] = []
    ticket = SimpleNamespace(group=None)
    answers = iter([None, None, samples("0", 0.5)])  # while they are waited for
    done = SimpleNamespace(group=samples("1", 0.5))
    collectors = MagicMock(**{"submit.return_value": [ticket, done]})
    two = {"all": lambda _: [ROW] * 2, "sets": lambda _: ["sums"] * 2}
    collectors.wait.side_effect = lambda: setattr(ticket, "group", next(answers))
    monkeypatch.setattr(command, "look_after", lambda servers, router: looks.append(servers.urls))
    prompts = SimpleNamespace(**vars(PROMPTS) | two)
    assert evaluated(config, monkeypatch, collectors, prompts, router=router) == (
        [A, B] if router is None else [ROUTER]
    )
    assert router is None or router.working == [A, B]
    assert looks == [[A, B]] * 2
    urgent = collectors.submit.call_args.kwargs["urgent"]
    assert urgent, "in a run nothing that is generated ahead may come before it"
    said = capsys.readouterr().out
    assert "val/score 0.5000" in said and "val-core/sums/acc/mean@1 0.5000" in said
    assert said.count("evaluating: 1 of 2 prompts") == 1, "no terminal shows how far it is"
    assert "val/version" not in said, "the servers have but one version"
    assert "accuracy" not in said, "a reward of 0.5 is neither right nor wrong"


def test_an_evaluation_leaves_its_numbers_its_answers_and_what_the_weights_were(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "config.json").write_text("{}")
    run = config.trainer.run_dir
    run.mkdir(parents=True)
    (run / "summary.json").write_text("of the training")
    found = [samples("0", 1.0), samples("1", 1.0), LostRollout(Prompt("2", [1], ""), "no server")]
    prompts = SimpleNamespace(all=lambda _: [ROW] * 3, some=lambda _: [], sets=lambda _: ["a"] * 3, questions=[])
    prompts.left_out, prompts.num_cut, prompts.tools_said = lambda _: 2, 0, ""
    evaluated(config, monkeypatch, answering(*found), prompts)
    folder = run / "evaluations" / "1"
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["accuracy"] == summary["score"] == pytest.approx(2 / 3)
    assert summary["accuracy_stderr"] == summary["score_stderr"] == pytest.approx(1 / 3)
    assert (summary["prompts"], summary["metrics"]["val/lost"]) == (3, 1.0)
    assert (summary["rewards"], summary["rewards_by_data_source"]) == (["auto"], {"exact": 3})
    listed = subprocess.run(["sha256sum", "model.safetensors"], cwd=tmp_path, capture_output=True, check=True).stdout
    of_file = {"bytes": 7, "sha256": hashlib.sha256(b"weights").hexdigest()}
    assert {name: summary["weights"][name] for name in ("folder", "sha256", "files")} == {
        "folder": str(tmp_path),
        "sha256": hashlib.sha256(listed).hexdigest(),
        "files": {"model.safetensors": of_file},
    }
    (line,) = read_lines(folder / "evaluations.jsonl")
    assert [prompt["reward"] for prompt in line["prompts"]] == [[1.0], [1.0], [0.0]]
    assert [row["uid"] for row in read_lines(folder / "answers.jsonl")] == ["0", "1"]
    said = capsys.readouterr().out
    numbers = summary["metrics"]
    assert (numbers["val/response_length/mean"], numbers["val/clip_ratio"]) == (1.0, 0.0)
    assert summary["prompts_filtered"] == 2 and "2 prompts are longer" in said
    assert (
        summary["tokens_per_s"] == pytest.approx(2 / max(summary["seconds"], 1e-9), rel=1) or summary["seconds"] < 0.1
    )
    assert f"2 answers in {summary['seconds']} s" in said
    assert "stderr" not in said and "val-aux" not in said
    assert "accuracy 0.6667" in said and said.endswith(f"results: {folder}\n")

    evaluated(config, monkeypatch, answering(samples("0", 0.0)))
    again = json.loads((folder.with_name("2") / "summary.json").read_text())
    assert (again["score"], again["accuracy"]) == (0.0, 0.0), "of a reward that is right or wrong"
    assert json.loads((folder / "summary.json").read_text()) == summary, "the first one stays"
    assert (run / "summary.json").read_text() == "of the training"


def test_weights_that_others_loaded_are_not_vouched_for(config: Config) -> None:
    config.rollout.urls = [A]
    assert weights_of(config) == {"model": config.model.path, "servers": [A]}


def test_a_server_that_died_gets_no_work_until_it_is_back_and_without_any_it_ends() -> None:
    router = router_of(A, B)
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
    counted |= {"val/response_length/mean": 1.0, "val/clip_ratio": 0.0}
    assert found.metrics() == {"val/score": 0.75, "val/score_stderr": pytest.approx(0.25), **counted}
    assert found.is_share
    lost = LostRollout(Prompt("3", [1], ""), "no server")
    more = Evaluation([*found.groups, lost], n=2, sets=["a", "a", "a", "b"])
    metrics = more.metrics()
    assert (metrics["val/score"], metrics["val/unscored"], metrics["val/lost"]) == (0.5, 3.0, 1.0)
    assert metrics["val-core/a/acc/mean@2"] == 0.75 and metrics["val-core/b/acc/mean@2"] == 0.0
    shaped = Evaluation([samples("0", 0.5), samples("1", 1.0)])
    assert not shaped.is_share and shaped.accuracy is None, "the mean of such rewards is a score, and no accuracy"
    right = [[replace(s, reward_extra={"acc": float(s.reward == 1)}) for s in group] for group in shaped.groups]
    assert Evaluation([*right, lost]).accuracy == Mean.of([0.0, 1.0, 0.0])


def test_lengths_and_cut_answers_of_an_evaluation_are_told_and_a_tenth_of_them_in_a_sentence() -> None:
    prompt, versions = Prompt("0", [1, 2, 3], ""), (VersionSpan(0, 0, 4),)
    cut = Sample.of(prompt, Completion([1] * 4, [-1.0] * 4, "length", versions), 0.0)
    found = Evaluation([[cut, *samples("0", 1.0)], samples("1", 1.0, 1.0)], n=2).metrics()
    assert (found["val/response_length/mean"], found["val/clip_ratio"]) == ((4 + 1 + 1 + 1) / 4, 0.25)
    sentence = cut_off(found)
    assert sentence is not None and "25 % " in sentence.replace("25%", "25 %")
    assert "rollout.val_kwargs.max_response_length" in sentence
    assert cut_off({"val/clip_ratio": 0.1}) is None and cut_off({}) is None


def answered(uid: str, *extras: dict[str, float]) -> list[Sample]:
    """Samples with these extra numbers, of which a right one has the reward 1."""
    return [
        replace(sample, reward=extra.get("acc", 0.0), reward_extra=extra)
        for extra, sample in zip(extras, samples(uid, *(0.0 for _ in extras)), strict=True)
    ]


def test_what_chose_itself_is_said_and_counted() -> None:
    raw = {"answer": "12 + 34 = 46\n#### 46"}
    rows = [Prompt("0-0", [1], "?", "46", "", raw)] * 3 + [Prompt("0-3", [1], "?", "46", "mine")]
    config, said = resolved(Config()), list[str]()
    say_chosen(config, rows, said.append)
    more = "exact pays for the bare ground truth only, as there is no rule for data_source 'mine'"
    assert said == [f"reward.fn=auto: by the data source gsm8k scores 3 rows, exact scores 1 row; {more}"]
    assert chosen_rewards(config, rows) == {"gsm8k": 3, "exact": 1}
    rows.append(Prompt("0-4", [1], "?", "46", "numina_olympiads"))
    say_chosen(config, rows[4:], said.append)
    assert said[1].endswith("verl scores numina_* with a function of its own, math is the nearest")
    config.reward.fn = ["gsm8k"]
    say_chosen(config, rows, said.append)
    assert len(said) == 2 and chosen_rewards(config, rows) == {}


def test_numbers_of_a_reward_replace_nothing_of_an_evaluation() -> None:
    result = to_result({"score": 1.0, "reward": 0.1, "uid": 7, "set": 8, "audit": 9, "reward_error": 1})
    group = [replace(sample, reward=result.reward, reward_extra=result.extra) for sample in samples("0-3", 0.0)]
    found = Evaluation([group], sets=["sums"])
    metrics, (prompt,) = found.metrics(), found.line(step=0)["prompts"]
    assert metrics["val/score"] == metrics["val-core/sums/reward/mean@1"] == 1.0
    assert metrics["val-aux/sums/extra/reward/mean@1"] == 0.1
    assert found.audits == (0, 0) and "audit/failed" not in metrics
    assert (prompt["uid"], prompt["set"], prompt["reward"], prompt["extra/uid"]) == ("0-3", "sums", [1.0], [7.0])


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
    right, *errors = answered("0", {"acc": 1.0}, *[{"reward_error": 1.0}] * 3)
    found = Evaluation([[replace(right, reward_extra={name: 1.0}), *errors]], n=4, sets=["s"])
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
    evaluator, _ = evaluator_of(3, 3)
    evaluator.submit()
    assert evaluator.ready() and evaluator.take().version == 3, "without a version they are of the oldest one"
    evaluator, _ = evaluator_of(7, 6, 6, 6)  # the servers stay with other weights
    evaluator.submit(version=7)
    assert not evaluator.ready() and not evaluator.ready()
    with pytest.raises(RuntimeError, match="version 7 got replies of version 6, 3 times"):
        evaluator.ready()


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


def beside(story: list[Any], folder: Path, *, holding: bool = True) -> Evaluations:
    """One whose evaluator is ready at the third question."""
    questions = iter((False, False, True))
    evaluator: Any = SimpleNamespace(
        progress=(1, 4),
        submit=lambda version: story.append(("submit", version)),
        ready=lambda: next(questions),
        take=lambda: Evaluation([], version=7),
        cancel=lambda: story.append("cancel"),
    )
    servers: Any = SimpleNamespace(version=7, watch=lambda: holding)
    trackers: Any = SimpleNamespace(
        stage=lambda name, done, total: story.append(f"{name} {done} of {total}"),
        log=lambda step, metrics: story.append((step, metrics["val/version"])),
    )
    saver: Any = SimpleNamespace(poll=lambda: story.append("poll"), note_score=lambda *_: None)
    return Evaluations(evaluator, servers, run_log(folder, trackers), saver)


def test_it_begins_with_the_version_that_the_servers_hold_and_is_noted_at_its_step_or_given_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    story: list[Any] = []
    evaluation = beside(story, tmp_path)
    evaluation.begin()
    evaluation.finish()
    assert story == [] and not evaluation.has_begun, "nothing is planned"
    evaluation.plan(7)
    evaluation.begin()
    story.append("gradient")
    for _ in range(2):
        evaluation.finish()
    assert story == [("submit", 7), "gradient", *["poll", "testing 1 of 4"] * 2, (7, 7.0)]
    del story[:]
    evaluation = beside(story, tmp_path, holding=False)
    evaluation.plan(7)
    evaluation.begin()
    evaluation.finish()
    assert story[1:] == ["cancel"]
    said = capsys.readouterr().err
    assert said == "warning: the evaluation after step 7 is given up: no server holds its weights any more\n"
