"""Which teacher reads which samples, and the columns that it leaves."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from config_helpers import load
from several_rows import row_of

from megarl.algo import estimate
from megarl.algo.distillation import NO_LOG_PROB
from megarl.config.schema.roles import Distill
from megarl.data.batch import make_batch
from megarl.samples.batch import Batch
from megarl.samples.sample import Completion, Prompt, Sample, TurnSpan, VersionSpan
from megarl.trainer.teachers import Teachers, check_taught, make_route


class Reader:
    """Says of token v that its log-prob is -v / 100, and that its hidden states are v over and over."""

    def __init__(self, hidden_size: int = 2) -> None:
        self.hidden_size = hidden_size
        self.read: list[list[int]] = []

    def log_probs(self, batch: Batch) -> torch.Tensor:
        self.read.append(batch.tokens.tolist())
        return -batch.tokens.float() / 100

    def top_log_probs(self, batch: Batch, k: int, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        log_probs = -batch.tokens[:, None].float() / 100
        return batch.tokens[:, None].expand(-1, k), log_probs.expand(-1, k)

    def hidden_states(self, batch: Batch) -> torch.Tensor:
        self.read.append(batch.tokens.tolist())
        return batch.tokens[:, None].expand(-1, self.hidden_size).to(torch.bfloat16)


def sample(source: str, prompt: list[int], answer: list[int]) -> Sample:
    completion = Completion(answer, [-0.5] * len(answer), "stop", (VersionSpan(0, 0, len(answer)),))
    return Sample.of(Prompt(f"0-{source}", prompt, "", data_source=source), completion, 1.0)


GROUPS = [[sample("sums", [1, 2], [3])], [sample("other", [4], [5, 6]), sample("code", [7], [8])]]


def teachers(distill: Distill, *, coefs: tuple[float, float] = (1.0, 1.0), num_steps: int = 10) -> Teachers:
    models: dict[str, Any] = {"math": Reader(3), "code": Reader(2)}
    of_source = {"sums": "math", "code": "code"}
    return Teachers(
        models, dict(zip(models, coefs, strict=True)), lambda p: of_source.get(p.data_source), distill, num_steps, 50
    )


def batch_of(groups: list[list[Sample]]) -> Batch:
    batch = make_batch(groups)
    return batch.with_columns(old_log_probs=torch.full((batch.num_tokens,), -0.05))


def test_each_sample_has_the_number_of_its_teacher_and_its_weight() -> None:
    batch, stats = teachers(Distill(coef=2.0), coefs=(1.0, 0.25)).read(batch_of(GROUPS), GROUPS, 0)
    assert batch.per_sequence["teacher"].tolist() == [1, 0, 2]
    assert batch.columns["teacher"].tolist() == [0, 0, 1, 0, 0, 0, 0, 2], "of the learnt tokens alone"
    assert batch.columns["distill_weight"].tolist() == [0.0, 0.0, 2.0, 0.0, 0.0, 0.0, 0.0, 0.5]
    assert "teacher_reward" not in batch.columns
    assert {name: stat.result() for name, stat in stats.items()} == pytest.approx(
        {"distill/coef": 2.0, "distill/math/share": 1 / 3, "distill/code/share": 1 / 3}
    )


def read_whole(both: Teachers, groups: list[list[Sample]], step: int = 0) -> tuple[Batch, list[int]]:
    """A batch that the teachers have read for an iteration and, if they do, for a step; how often each was asked."""
    batch, _ = both.read(batch_of(groups), groups, step)
    batch = both.read_step(batch) if both.reads_steps else batch
    models: list[Any] = list(both.models.values())
    return batch, [len(model.read) for model in models]


def test_hidden_states_are_those_of_the_own_teacher_alone() -> None:
    both = teachers(Distill())
    batch, _ = read_whole(both, GROUPS)
    hidden = batch.columns["teacher_hidden"]
    assert hidden.dtype is torch.bfloat16
    assert hidden.tolist() == [[v, v, v] for v in (1, 2, 3)] + [[0, 0, 0]] * 3 + [[v, v, 0] for v in (7, 8)]
    assert [model.read for model in both.models.values()] == [[[1, 2, 3]], [[7, 8]]]
    batch, asked = read_whole(teachers(Distill()), GROUPS[:1])
    assert batch.columns["teacher_hidden"].shape == (3, 3)
    assert asked == [1, 0], "a teacher without a sample is not asked"
    assert not read_whole(teachers(Distill()), [GROUPS[1][:1]])[0].columns["teacher_hidden"].any()


def test_the_most_likely_tokens_are_those_at_learnt_tokens_of_the_own_teacher() -> None:
    batch, _ = teachers(Distill(top_k=2)).read(batch_of(GROUPS), GROUPS, 0)
    assert batch.columns["teacher_ids"].tolist() == [[v, v] for v in (-1, -1, 3, -1, -1, -1, -1, 8)]
    said = batch.columns["teacher_top_log_probs"][:, 0].tolist()
    assert said == pytest.approx([NO_LOG_PROB] * 2 + [-0.03] + [NO_LOG_PROB] * 4 + [-0.08])


def test_as_reward_the_gap_of_the_sampled_token_is_added_to_its_advantage() -> None:
    both = teachers(Distill(form="reward", coef=2.0), coefs=(1.0, 0.5))
    batch, stats = both.read(batch_of(GROUPS), GROUPS, 0)
    gaps = [-0.03 + 0.05, -0.08 + 0.05]  # of the tokens 3 and 8
    learnt = batch.columns["response_mask"] != 0
    assert batch.columns["teacher_reward"][learnt].tolist() == pytest.approx([2 * gaps[0], 0.0, 0.0, gaps[1]])
    assert stats["distill/math/log_prob_gap"].result() == pytest.approx(gaps[0])
    assert stats["distill/code/log_prob_gap"].result() == pytest.approx(gaps[1])
    alone, _ = estimate(batch, adv_estimator="none")
    assert alone.columns["advantages"][learnt].tolist() == pytest.approx([2 * gaps[0], 0.0, 0.0, gaps[1]])
    assert not alone.columns["advantages"][~learnt].any()
    plain, _ = estimate(batch_of(GROUPS), adv_estimator="reinforce_plus_plus", gamma=0.5)
    added, _ = estimate(batch, adv_estimator="reinforce_plus_plus", gamma=0.5)
    difference = (added.columns["advantages"] - plain.columns["advantages"])[learnt]
    assert difference.tolist() == pytest.approx([2 * gaps[0], 0.0, 0.0, gaps[1]], abs=1e-6)
    assert torch.equal(added.columns["returns"], plain.columns["returns"]), "it is no part of what a critic learns"
    clipped, _ = estimate(batch, adv_estimator="none", advantage_clip=0.035)
    assert clipped.columns["advantages"][learnt].tolist() == pytest.approx([0.035, 0.0, 0.0, -0.03])


def test_rows_of_a_sample_have_the_teacher_of_their_prompt() -> None:
    """Where turns alternate, the reward stays on the token that it is of."""
    rng, prompt = random.Random(0), Prompt("0-sums", [1], "", data_source="sums")
    first_row = row_of(rng, [1, 2, 3, 4, 5], [TurnSpan(0, 1, 2), TurnSpan(2, 4, 5)])
    second_row = row_of(rng, [1, 9], [TurnSpan(1, 1, 2)])
    groups = [[Sample(prompt, (first_row, second_row), 1.0)], [sample("code", [7], [8])]]
    batch, _ = teachers(Distill(form="reward")).read(batch_of(groups), groups, 0)
    assert batch.rows.tolist() == [2, 1] and "turn" in batch.columns
    first = batch.segment_ids == 0
    learnt = first & (batch.columns["response_mask"] != 0)
    assert batch.columns["teacher"][first].tolist() == learnt[first].long().tolist()
    alone, _ = estimate(batch, adv_estimator="none")
    expected = -batch.tokens[learnt].float() / 100 + 0.05
    assert alone.columns["advantages"][learnt].tolist() == pytest.approx(expected.tolist(), abs=1e-6)


@pytest.mark.parametrize(
    ("distill", "coefs", "asked"),
    [
        (Distill(coef=1.0, end_coef=0.0, decay_style="linear", decay_steps=1), (1.0, 1.0), [0, 0]),
        (Distill(), (0.0, 0.5), [0, 1]),
    ],
)
@pytest.mark.parametrize("form", [{"form": "reward"}, {}])
def test_a_teacher_that_weighs_nothing_is_not_asked(
    distill: Distill, coefs: tuple[float, float], asked: list[int], form: dict[str, str]
) -> None:
    both = teachers(replace(distill, **form), coefs=coefs)  # type: ignore[arg-type]
    assert both.reads_steps is not bool(form)
    batch, found = read_whole(both, GROUPS, step=1)
    assert found == asked
    assert not batch.columns["teacher"][:6].any() and bool(batch.columns["teacher"][7]) == bool(asked[1])
    stats = both.read(batch_of(GROUPS), GROUPS, 1)[1]
    assert stats["distill/math/share"].result() == pytest.approx(1 / 3), "its samples are its own all the same"


@pytest.mark.parametrize(
    ("distill", "by_step"),
    [
        (Distill(coef=3.0), {0: 3.0, 99: 3.0}),
        (Distill(coef=1.0, end_coef=0.0, decay_style="linear"), {0: 1.0, 5: 0.5, 10: 0.0, 99: 0.0}),
        (Distill(coef=1.0, end_coef=3.0, decay_style="linear", decay_steps=4), {0: 1.0, 1: 1.5, 4: 3.0, 9: 3.0}),
        (Distill(coef=2.0, end_coef=0.0, decay_style="cosine"), {0: 2.0, 5: 1.0, 10: 0.0}),
    ],
)
def test_the_coefficient_follows_its_schedule(distill: Distill, by_step: dict[int, float]) -> None:
    found = teachers(distill, num_steps=10)
    assert {step: found.coef(step) for step in by_step} == pytest.approx(by_step, abs=1e-12)


MATH, CODE = "teachers.math.model.path=a", "teachers.code.model.path=b"


def test_prompts_are_routed_by_their_data_source() -> None:
    route = make_route(load(MATH, CODE, "teachers.code.data_sources=[code,tests]"))
    prompts = [Prompt("0-0", [1], "", data_source=source) for source in ("tests", "code", "sums", "")]
    assert [route(prompt) for prompt in prompts] == ["code", "code", "math", "math"]
    route = make_route(load(CODE, "teachers.code.data_sources=[code]"))
    assert [route(prompt) for prompt in prompts] == [None, "code", None, None]


def test_each_source_of_a_teacher_has_prompts_and_where_only_teachers_teach_each_prompt_has_one() -> None:
    alone, of_code = "algorithm.adv_estimator=none", "teachers.code.data_sources=[code]"
    config = load(MATH, CODE, "teachers.code.data_sources=[code,tsts]")
    check_taught(config, {"code", "tsts", "sums"})
    with pytest.raises(ValueError, match=r"has the data_source tsts; expected some of \[code, tests\]"):
        check_taught(config, {"code", "tests"})
    with pytest.raises(ValueError, match="prompts of the data_source 'sums' have no teacher, so nothing is learnt"):
        check_taught(load(CODE, of_code, alone), {"code", "sums"})
    check_taught(load(CODE, of_code, alone), {"code"})
    Path("who.py").touch()
    for words in ((CODE, of_code), (MATH, CODE, of_code, alone), (CODE, alone, "distill.route=who.py:who")):
        check_taught(load(*words), {"code", "sums"})


def test_prompts_are_routed_by_a_function(tmp_path: Path) -> None:
    file = tmp_path / "who.py"
    file.write_text(
        "def who(prompt):\n    return {1: 'math', 2: 'nobody'}.get(prompt.token_ids[0])\n\ndef no():\n    pass\n"
    )
    route = make_route(load(MATH, f"distill.route={file}:who"))
    assert [route(Prompt("0-0", [first], "")) for first in (1, 3)] == ["math", None]
    with pytest.raises(ValueError, match="expected a function of one argument, the prompt"):
        make_route(load(MATH, f"distill.route={file}:no"))
    found = replace(teachers(Distill(route="who.py:who")), route=route)
    groups = [[sample("sums", [2], [3])]]
    with pytest.raises(ValueError, match="it returns 'nobody' for prompt 0-sums; expected one of .* math, code"):
        found.read(batch_of(groups), groups, 0)
