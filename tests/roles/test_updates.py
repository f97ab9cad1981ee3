"""What an update of the driver's handles asks of a group: its steps, their weights, old log-probs, bad numbers."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from noting_group import (
    Answer,
    NotingGroup,
    Payload,
    in_rows,
    make_actor,
    make_batch,
    not_made,
    sequences,
    trained,
    updated,
    without_old,
)

from megarl.algo.finite import BadNumber, NonFiniteError
from megarl.algo.loss import ActorLoss, CriticLoss
from megarl.algo.spikes import Limits, Spikes
from megarl.group import Reply
from megarl.roles.handles import LATER, Critic
from megarl.roles.messages import Offload, Onload
from megarl.roles.settings import Packing, Update
from megarl.samples.batch import Batch, Stat, token_positions


def test_epochs_times_mini_batches_of_whole_groups_and_the_same_for_the_same_seed() -> None:
    group, _ = updated(make_batch(4), seed=5, epochs=3)
    assert len(group.calls) == 3 * 2
    of_steps = [set(group.sent("tokens", call).tolist()) for call in range(6)]
    for first, second in zip(of_steps[::2], of_steps[1::2], strict=True):
        assert first | second == set(range(32)) and not first & second, "an epoch sees every token once"
        for of_step in (first, second):
            assert {t // 8 for t in of_step} == {t // 8 for t in of_step if t % 8 == 0}, "whole groups"
    assert len({frozenset(of_step) for of_step in of_steps[::2]}) > 1, "each epoch shuffles anew"
    same, other = (updated(make_batch(4), seed=seed, epochs=3)[0] for seed in (5, 6))
    sent = [[each.sent("tokens", call).tolist() for call in range(6)] for each in (group, same, other)]
    assert sent[0] == sent[1] != sent[2]


def test_a_role_that_is_offloaded_comes_and_goes_once_for_all_steps_of_an_update() -> None:
    """With passes of others between its steps it comes and goes for each, as they need the device."""
    for prepare, wanted in ((lambda batch: batch, ["update"] * 4), (None, ["onload", *["update"] * 4, "offload"])):
        group = NotingGroup(2, trained())
        actor = make_actor(group, epochs=2)
        actor.offloads = True
        actor.update(make_batch(4), prepare=prepare)
        assert group.methods == wanted
    assert group.calls[0][0] == Onload("actor", by_default=False, moments=None), "all of it comes"
    assert group.calls[-1][0] == Offload("actor", by_default=True), "no more goes than its options say"


def test_a_rank_gets_what_the_loss_needs_and_micro_batches_hold_no_more_than_the_packing_allows() -> None:
    group, _ = updated(make_batch(4))
    for message, payloads in group.calls:
        assert message.method() == "update"
        assert (message.role, message.temperature) == ("actor", 0.7)
        assert (message.loss, message.reference) == (ActorLoss("ppo"), None)
        assert message.num_tokens == 16, "two groups of 3 + 5 tokens, prompts included"
        assert len({len(payload["micro_sizes"]) for payload in payloads}) == 1, "equally many micro-batches"
        for payload in payloads:
            of_loss = {"weight", "response_mask", "old_log_probs", "advantages"}
            assert payload.keys() == of_loss | {"tokens", "lengths", "rows", "micro_sizes"}
            assert (payload["tokens"].dtype, payload["lengths"].dtype) == (torch.int32, torch.int64)
            assert torch.equal(payload["advantages"], payload["tokens"] + 0.5), "columns stay beside their tokens"
            parts = payload["lengths"].split(payload["micro_sizes"].tolist())
            assert all(int(part.sum()) <= 10 for part in parts)
    batch, critic = make_batch(4), Critic("critic", group, Packing(max_tokens=None, max_sequences=1))  # type: ignore
    assert [p.micro_sizes for p in critic._plan(batch)[0]] == [[1] * 4] * 2


def test_payloads_of_a_plan_rebuild_the_batch() -> None:
    """Nothing is lost or doubled; a replica without sequences runs dummies."""
    batch, group = make_batch(4), NotingGroup(3, trained())
    make_actor(group, prompts_per_step=4).update(batch)
    got = sorted(sequence for payload in group.calls[0][1] for sequence in sequences(payload))
    assert got == sorted(batch.tokens[token_positions(batch.lengths, torch.tensor([i]))].tolist() for i in range(8))
    group, _ = updated(make_batch(1).select([0]))
    full, empty = sorted(group.calls[0][1], key=lambda p: -len(p["tokens"]))
    assert (full["micro_sizes"].tolist(), empty["micro_sizes"].tolist()) == ([1], [0])
    assert {name: len(tensor) for name, tensor in empty.items()} == dict.fromkeys(empty, 0) | {"micro_sizes": 1}


@pytest.mark.parametrize(
    ("how", "weight"),
    [
        ({}, 1 / 10),  # token-mean over the whole step: 2 + 3 trainable tokens in each of 2 groups
        ({"agg_mode": "seq-mean-token-sum-norm", "loss_scale_factor": 100.0}, 1 / (4 * 100)),
        ({"agg_mode": "prompt-mean-token-mean"}, 1 / (2 * 5)),
    ],
)
def test_the_aggregation_reaches_the_ranks_as_weights_over_all_replicas(how: dict[str, Any], weight: float) -> None:
    group, _ = updated(make_batch(4), **how)
    for call in range(2):
        weights = group.sent("weight", call)
        assert weights[weights > 0].tolist() == pytest.approx([weight] * 10)
        assert torch.equal(weights > 0, group.sent("response_mask", call) > 0)


def test_the_weights_of_rollout_correction_have_mean_1_in_each_step() -> None:
    batch = make_batch(4).with_columns(rollout_weight=torch.arange(32) + 1.0)
    group, _ = updated(batch, loss=ActorLoss(use_rollout_weight=True), normalize=True)
    for call in range(2):
        weights, mask = group.sent("rollout_weight", call), group.sent("response_mask", call)
        assert float(weights[mask > 0].mean()) == pytest.approx(1.0)


def test_statistics_are_merged_over_replicas_and_steps() -> None:
    group, stats = updated(make_batch(4), trained([1e-9, 0.25]))
    # Each step's weights sum to 1; replica 0 reports 1 and replica 1 reports 2, each for its tokens.
    shares = [float(p["weight"].sum()) for _, payloads in group.calls for p in payloads]
    expected = (shares[0] + 2 * shares[1] + shares[2] + 2 * shares[3]) / 2
    assert stats["actor/loss"].result() == pytest.approx(expected)
    assert stats["actor/loss"].weight == pytest.approx(2.0)
    assert stats["actor/largest"].result() == 5
    assert stats["actor/grad_norm"].result() == pytest.approx(2.5), "the mean of 2 and 3: once a step, not a replica"
    assert stats["actor/lr"].result() == 0.5
    assert stats["actor/skipped_steps"].result() == 0
    assert stats["actor/first_ppo_kl"].result() == pytest.approx(1e-9), "of the first step alone"
    assert stats["actor/ppo_kl"].result() == pytest.approx((1e-9 + 0.25) / 2)


def test_a_critic_trains_with_its_own_loss_and_a_full_kl_is_asked_of_the_actor_and_its_reference() -> None:
    group: Any = NotingGroup(2, trained())
    critic = Critic("critic", group, Packing(), update_settings=Update(CriticLoss(0.5), prompts_per_step=4))
    _, stats = critic.update(make_batch(4))
    message, payloads = group.calls[0]
    assert (message.loss, message.temperature) == (CriticLoss(0.5), 1.0)
    assert {"values", "returns"} <= payloads[0].keys()
    assert "critic/grad_norm" in stats and not any("ppo_kl" in name for name in stats)
    noted, _ = updated(make_batch(4), loss=ActorLoss("ppo", use_kl_loss=True, kl_loss_type="full"), reference="ref")
    message, payloads = noted.calls[0]
    assert (message.loss.outputs, message.reference) == (("log_probs", "entropy", "full_kl"), "ref")
    assert "ref_log_probs" not in payloads[0]


def test_a_selection_is_drawn_anew_for_each_step_and_again_for_the_same_seed() -> None:
    batch = make_batch(8).with_columns(
        old_log_probs=torch.linspace(-9, 0, 64) ** 3, advantages=torch.linspace(-1, 1, 64) ** 3
    )
    loss = ActorLoss("clip_cov", args={"clip_cov_ratio": 0.2, "clip_cov_lb": -1e9, "clip_cov_ub": 1e9})
    drawn = []
    for seed in (1, 1, 2):
        group, _ = updated(batch, seed=seed, prompts_per_step=8, epochs=2, loss=loss)
        chosen = [frozenset(group.sent("tokens", c)[group.sent("selected", c) > 0].tolist()) for c in range(2)]
        assert {len(c) for c in chosen} == {8}, "a fifth of the 40 trainable tokens"
        drawn.append(chosen)
    assert drawn[0] == drawn[1]
    assert len({*drawn[0], *drawn[2]}) == 4


def test_a_step_without_a_trainable_token_is_skipped_and_counted() -> None:
    batch = make_batch(4)
    mask = batch.columns["response_mask"].clone()
    mask[:24] = 0  # three of the four groups
    group, prepared = NotingGroup(2, trained([1e-9, 0.25])), list[Batch]()

    def prepare(step: Batch) -> Batch:
        prepared.append(step)
        return step

    _, stats = make_actor(group, prompts_per_step=1).update(batch.with_columns(response_mask=mask), prepare=prepare)
    assert len(group.calls) == len(prepared) == 1
    assert group.calls[0][0].num_tokens == 8
    assert stats["actor/skipped_steps"].result() == 3
    assert stats["actor/first_ppo_kl"].result() == pytest.approx(1e-9), "of the first step that was taken"
    group, stats = updated(batch.with_columns(response_mask=torch.zeros(32)), prompts_per_step=4)
    assert (stats, group.calls) == ({"actor/skipped_steps": Stat("sum", 1.0)}, []), "nothing is asked of the ranks"


@pytest.mark.parametrize("num_groups", [1, 4])
def test_the_first_step_gives_the_old_log_probs_that_are_lacking(num_groups: int) -> None:
    group = NotingGroup(2, trained([0.0] * 9))
    batch, stats = make_actor(group, prompts_per_step=4, epochs=3).update(without_old(num_groups), seed=3)
    assert torch.equal(batch.columns["old_log_probs"], -batch.tokens.float()), "in the order of the batch"
    assert [call[0].notes for call in group.calls] == [("log_probs",), (), ()]
    assert not any("old_log_probs" in payload for payload in group.calls[0][1])
    for call in (1, 2):
        assert torch.equal(group.sent("old_log_probs", call), -group.sent("tokens", call).float())
    assert "actor/ppo_kl" in stats and "actor/first_ppo_kl" not in stats, "nothing was compared"


@pytest.mark.parametrize("has_old", [True, False])
def test_with_bypass_the_loss_reads_the_servers_log_probs_and_those_of_the_policy_are_noted(has_old: bool) -> None:
    group = NotingGroup(2, trained([0.0] * 9))
    batch = make_batch(2) if has_old else without_old(2)
    batch = batch.with_columns(rollout_log_probs=torch.arange(16) - 100.0)
    batch, stats = make_actor(group, bypass=True, epochs=2).update(batch)
    for call in range(2):
        assert torch.equal(group.sent("old_log_probs", call), group.sent("tokens", call) - 100.0)
    assert torch.equal(batch.columns["old_log_probs"], batch.tokens + 0.5 if has_old else -batch.tokens.float())
    assert "actor/first_ppo_kl" in stats, "the gap to the server"


def test_a_first_step_that_is_not_made_leaves_them_to_a_pass() -> None:
    """Its weights have not moved, and the pass gives the tokens themselves."""
    whole = trained([0.0] * 9)
    group = NotingGroup(2, lambda *call: not_made(math.inf, where=[None]) if len(group.calls) == 1 else whole(*call))
    actor, told = make_actor(group, epochs=3), list[BadNumber]()
    actor.on_bad = told.append
    batch, _ = actor.update(without_old(2))
    assert len(told) == 1
    assert group.methods == ["update", "columns", "update", "update"]
    assert torch.equal(batch.columns["old_log_probs"], batch.tokens.float())
    group = NotingGroup(2, whole)
    batch, _ = make_actor(group).update(without_old(2).with_columns(response_mask=torch.zeros(16)))
    assert group.methods == ["columns"]
    assert torch.equal(batch.columns["old_log_probs"], batch.tokens.float())


def test_with_several_steps_a_pass_before_gives_those_of_the_others() -> None:
    batch, group = without_old(6), NotingGroup(2, trained())
    actor = make_actor(group, epochs=2)
    batch = actor.with_old_log_probs(batch, (), seed=3)
    later = batch.columns[LATER]
    rest = set(group.sent("tokens").tolist())
    assert len(rest) == 4 * 8
    assert later.tolist() == [float(t) if t in rest else 0.0 for t in range(48)]
    batch, _ = actor.update(batch, seed=3)
    assert set(group.sent("tokens", 1).tolist()) == set(range(48)) - rest
    assert [call[0].notes for call in group.calls[1:]] == [("log_probs",), *[()] * 5]
    signs = torch.tensor([1.0 if t in rest else -1.0 for t in range(48)])
    assert torch.equal(batch.columns["old_log_probs"], signs * batch.tokens)
    for call in range(2, 7):
        tokens = group.sent("tokens", call).long()
        assert torch.equal(group.sent("old_log_probs", call), signs[tokens] * tokens)
    group = NotingGroup(2, trained())
    batch = without_old(2)
    assert make_actor(group).with_old_log_probs(batch, (), seed=3) is batch, "a single step needs none"
    assert not group.calls


@pytest.mark.parametrize("make", [make_batch, in_rows])
@pytest.mark.parametrize("loss", ["ppo", "gspo"])
def test_a_number_that_is_not_finite_is_found_again_in_its_sample(make: Any, loss: str) -> None:
    """Token 6 of the batch: token 3 of its second sample.  The rank counts in its own share of a shuffled step."""

    def answer(message: Any, payload: Payload, replica: int) -> Reply:
        if 6 not in payload["tokens"].tolist():
            return not_made()
        sent = Batch(payload["tokens"], payload["lengths"], rows=payload["rows"])
        place = payload["tokens"].tolist().index(6)
        sequence = int(sent.segment_ids[place])
        token = place - int((sent.segment_ids < sequence).sum())
        return not_made(bad={"sequence": sequence, "token": token, "column": "log_probs", "value": 7.0})

    with pytest.raises(NonFiniteError, match="log_probs is 7.0 at token 3 of sequence 1 ") as caught:
        updated(make(8), answer, loss=ActorLoss(loss), prompts_per_step=8, seed=3)
    assert (caught.value.sequence, caught.value.token, caught.value.role) == (1, 3, "actor")
    assert caught.value.groups == tuple(range(8))


def test_a_step_that_was_not_made_has_no_statistics_and_the_next_one_comes() -> None:
    """Of two mini-batches the first; whoever is told may raise, or not."""
    where = [None, "decoder.layers.0.weight", "decoder.layers.0.weight"]
    whole: Answer = trained()
    group = NotingGroup(2, lambda *call: not_made(math.inf, where=where) if len(group.calls) == 1 else whole(*call))
    actor, told = make_actor(group), list[BadNumber]()
    actor.on_bad = told.append
    _, stats = actor.update(make_batch(4))
    assert len(group.calls) == 2
    assert stats["actor/loss"].weight == pytest.approx(1.0), "of the second step alone"
    assert stats["actor/skipped_steps"].result() == 0, "these are the steps without a trainable token"
    (found,) = told
    ranks = "on ranks 1, 2, first in decoder.layers.0.weight"
    assert str(found) == f"the gradient norm of actor is inf ({ranks}): expected a finite number"
    shown = {t // 8 for t in group.sent("tokens").tolist()}
    assert set(found.groups) == shown and len(shown) == 2
    with pytest.raises(BadNumber, match="^the gradient norm of actor is nan .float32 cannot hold it"):
        updated(make_batch(1), lambda *_: not_made(where=[None]))


def test_limits_follow_from_the_steps_that_were_made() -> None:
    """Norms 2, 3, 2, 3, ... and losses of -1, which are all equal: no limit."""
    group = NotingGroup(1, lambda *_: not_made(2.0 + len(group.calls) % 2, made=True))
    actor = make_actor(group, prompts_per_step=1)
    actor.spikes = Spikes(4.0, 1.0)
    for _ in range(5):
        actor.update(make_batch(4))
    limits = [call[0].limits for call in group.calls]
    assert limits[:16] == [Limits()] * 16
    deviation = math.sqrt(16 * 0.25 / 15)
    assert limits[16] == Limits(pytest.approx(2.5 + 4 * deviation), None)
    group.answer, told = lambda *_: not_made(9.0), list[BadNumber]()
    actor.on_bad = told.append
    actor.update(make_batch(1))
    assert str(told[0]).startswith("the gradient norm of actor is 9, a spike: over the last 20 steps its mean is 2.5 ")


@pytest.mark.parametrize(("shares", "share"), [(True, (10 + 4) / 20), (False, 1.0)])
def test_the_share_of_places_that_are_computed_is_told(shares: bool, share: float) -> None:
    """Rows of 10 tokens, 8 in common: one whole; of the other 2, the last common one, and one for a cut."""
    tokens = torch.tensor([*range(8), 20, 21, *range(8), 30, 31])
    columns = {name: torch.ones(20) for name in ("old_log_probs", "advantages")}
    columns["response_mask"] = torch.tensor([*[0.0] * 8, 1.0, 1.0] * 2)
    of_rows = {"group": torch.zeros(2, dtype=torch.int64), "score": torch.zeros(2)}
    actor = make_actor(NotingGroup(1, trained()))
    actor.packing, actor.shares_prefixes = Packing(max_tokens=40, share_prefixes="auto"), shares
    _, stats = actor.update(Batch(tokens, torch.tensor([10, 10]), columns, of_rows))
    assert stats["actor/computed_share"].result() == pytest.approx(share)


def micros_of(payload: Payload) -> list[list[int]]:
    """The tokens of each micro-batch."""
    batch = Batch(payload["tokens"], payload["lengths"], rows=payload["rows"])
    sizes = payload["micro_sizes"].tolist()
    ends = payload["micro_sizes"].cumsum(0).tolist()
    return [batch.select(range(end - n, end)).tokens.tolist() for end, n in zip(ends, sizes, strict=True)]


@pytest.mark.parametrize(("loss", "is_together"), [("ppo", False), ("gspo", True), ("gmpo", True)])
def test_rows_part_for_a_loss_that_looks_at_its_token_and_stay_together_for_one_that_looks_at_the_sample(
    loss: str, is_together: bool
) -> None:
    """Each of the 4 samples of a step has a quarter of the weight, whatever its rows."""
    group, _ = updated(in_rows(), loss=ActorLoss(loss), agg_mode="seq-mean-token-mean")
    for call, (message, payloads) in enumerate(group.calls):
        assert message.num_tokens == 16
        micros = [micro for payload in payloads for micro in micros_of(payload)]
        assert sorted(token for micro in micros for token in micro) == sorted(group.sent("tokens", call).tolist())
        assert all(len(micro) <= 10 for micro in micros)
        assert set(group.sent("rows", call).tolist()) == ({1, 2} if is_together else {1})
        weights = dict(zip(group.sent("tokens", call).tolist(), group.sent("weight", call).tolist(), strict=True))
        for start in {token // 8 * 8 for token in weights}:  # a group's second sample is tokens 3 to 7 of its 8
            holders = [micro for micro in micros if {*range(start + 3, start + 8)} & {*micro}]
            assert len(holders) <= 1 or not is_together
            assert sum(weights[start + i] for i in range(3)) == pytest.approx(0.25)
            assert sum(weights[start + i] for i in range(3, 8)) == pytest.approx(0.25)


def test_a_sample_whose_rows_do_not_fit_together_is_refused_for_a_ratio_of_the_sample_only() -> None:
    group: Any = NotingGroup(1, trained())
    apart, together = (replace(make_actor(group, loss=ActorLoss(n)), packing=Packing(4)) for n in ("ppo", "gspo"))
    apart.update(in_rows(1))
    with pytest.raises(ValueError, match=r"^actor.ppo_max_token_len_per_gpu=4: .*policy_loss_fn=gspo .* 5 tokens"):
        together.update(in_rows(1))
    assert len(group.calls) == 1
