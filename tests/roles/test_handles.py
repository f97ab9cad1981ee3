"""What the driver's handles ask of a group: packing, weights, optimizer steps; with a group that only takes notes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.algo.finite import BadNumber, NonFiniteError
from megarl.algo.loss import ActorLoss, CriticLoss
from megarl.algo.spikes import Spikes
from megarl.batch import Batch, Stat, token_positions
from megarl.data.packing import RankPlan
from megarl.group import RankError, Reply
from megarl.roles.columns import payload as payload_of
from megarl.roles.handles import Actor, Critic, Packing, Reference, Update
from megarl.roles.push_settings import PushSettings

Payload = dict[str, Tensor]
LOADED: dict[str, Any] = {  # what a rank says of a model that it has loaded
    "parameters_per_rank": 7,
    "hidden_size": 16,
    "lacks_transformer_engine": False,
    "can_share": False,
    "device": "cpu",
}


class NotingGroup:
    """Stands for a Group of some replicas: remembers every call and answers with what `answer` makes of it."""

    def __init__(self, num_replicas: int, answer: Callable[[str, dict[str, Any], Payload, int], Reply]) -> None:
        self.num_replicas, self.answer = num_replicas, answer
        self.calls: list[tuple[str, dict[str, Any], list[Payload]]] = []

    def call(self, method: str, arguments: dict[str, Any], payloads: Sequence[Payload] | None = None) -> list[Reply]:
        assert payloads is None or len(payloads) == self.num_replicas
        self.calls.append((method, arguments, list(payloads or [])))
        given = payloads or [{}] * self.num_replicas
        return [self.answer(method, arguments, payload, replica) for replica, payload in enumerate(given)]

    def call_leader(self, method: str, arguments: dict[str, Any]) -> Reply:
        self.calls.append((method, arguments, []))
        return self.answer(method, arguments, {}, 0)


def trained(kl_of_step: Sequence[float] = ()) -> Callable[..., Reply]:
    """Answers of an `update`: each replica reports its tokens' share of the step's statistics."""
    kls = dict(enumerate(kl_of_step))
    seen = {"calls": 0}

    def answer(method: str, arguments: dict[str, Any], payload: Payload, replica: int) -> Reply:
        assert method == "update"
        step, seen["calls"] = divmod(seen["calls"], 2)[0], seen["calls"] + 1
        weight = float(payload["weight"].sum())
        kind = "critic" if "cliprange_value" in arguments["loss"] else "actor"
        stats: dict[str, Any] = {f"{kind}/loss": ["mean", weight * (1.0 + replica), weight]}
        stats[f"{kind}/largest"] = ["max", float(payload["lengths"].max()) if len(payload["lengths"]) else 0.0, 1.0]
        if kls:
            stats["actor/ppo_kl"] = ["mean", weight * kls[step], weight]
        return Reply({"stats": stats, "grad_norm": 2.0 + step, "lr": 0.5, "loss": -1.0, "made": True, "bad": None}, {})

    return answer


def make_batch(num_groups: int = 4) -> Batch:
    """Groups of two sequences of 3 and 5 tokens; the last 2 and 3 of them are the response."""
    lengths = torch.tensor([3, 5] * num_groups)
    mask = torch.tensor([0, 1, 1, 0, 0, 1, 1, 1] * num_groups, dtype=torch.float32)
    n = int(lengths.sum())
    columns = {name: torch.arange(n) + 0.5 for name in ("old_log_probs", "advantages", "values", "returns", "other")}
    rows = {"group": torch.arange(num_groups).repeat_interleave(2), "score": torch.zeros(2 * num_groups)}
    return Batch(torch.arange(n), lengths, {"response_mask": mask, **columns}, rows)


def make_actor(group: Any, **how: Any) -> Actor:
    update = Update(**{"loss": ActorLoss("ppo"), "prompts_per_step": 2, **how})
    return Actor("actor", group, Packing(max_tokens=10), temperature=0.7, update_settings=update)


def sequences(payload: Payload) -> list[list[int]]:
    return [part.tolist() for part in payload["tokens"].split(payload["lengths"].tolist())]


def test_epochs_times_mini_batches_of_whole_groups() -> None:
    group = NotingGroup(2, trained())
    make_actor(group, epochs=3).update(make_batch(4), seed=5)
    assert len(group.calls) == 3 * 2
    for first, second in zip(group.calls[::2], group.calls[1::2], strict=True):
        tokens = [{t for p in call[2] for t in p["tokens"].tolist()} for call in (first, second)]
        assert tokens[0] | tokens[1] == set(range(32)), "an epoch sees every token once"
        assert not tokens[0] & tokens[1]
        for of_step in tokens:
            assert {t // 8 for t in of_step} == {t // 8 for t in of_step if t % 8 == 0}, "whole groups"
    orders = {tuple(sorted(t // 8 for t in group.calls[2 * e][2][0]["tokens"].tolist())) for e in range(3)}
    assert len(orders) > 1, "each epoch shuffles anew"


def test_a_role_that_is_offloaded_comes_and_goes_once_for_all_steps_of_an_update() -> None:
    """With passes of others between its steps it comes and goes for each, as they need the device."""
    of_update = trained()

    def answer(method: str, arguments: dict[str, Any], payload: Payload, replica: int) -> Reply:
        return of_update(method, arguments, payload, replica) if method == "update" else Reply({}, {})

    for prepare, wanted in ((None, ["onload", *["update"] * 4, "offload"]), (lambda batch: batch, ["update"] * 4)):
        group = NotingGroup(2, answer)
        actor = make_actor(group, epochs=2)
        actor.offloads = True
        actor.update(make_batch(4), prepare=prepare)
        assert [method for method, _, _ in group.calls] == wanted
    group = NotingGroup(2, answer)
    actor = make_actor(group, epochs=2)
    actor.offloads = True
    actor.update(make_batch(4))
    assert group.calls[0][1] == {"role": "actor", "by_default": False, "moments": None}, "all of it comes"
    assert group.calls[-1][1] == {"role": "actor", "by_default": True}, "no more goes than its options say"


def test_the_same_seed_makes_the_same_steps() -> None:
    steps = []
    for seed in (1, 1, 2):
        group = NotingGroup(2, trained())
        make_actor(group).update(make_batch(6), seed=seed)
        steps.append([[p["tokens"].tolist() for p in payloads] for _, _, payloads in group.calls])
    assert steps[0] == steps[1] != steps[2]


def test_a_step_knows_its_tokens_and_weighs_them_over_all_replicas() -> None:
    group = NotingGroup(2, trained())
    make_actor(group).update(make_batch(4))
    for method, arguments, payloads in group.calls:
        assert method == "update"
        assert (arguments["role"], arguments["temperature"]) == ("actor", 0.7)
        assert (arguments["names"], arguments["reference"]) == (["log_probs", "entropy"], None)
        assert arguments["num_tokens"] == 16, "two groups of 3 + 5 tokens, prompts included"
        weight = torch.cat([p["weight"] for p in payloads])
        assert weight.sum().item() == pytest.approx(1.0), "token-mean over the whole step"
        assert weight[weight > 0].tolist() == pytest.approx([1 / 10] * 10), "2 + 3 trainable tokens in each of 2 groups"
        mask = torch.cat([p["response_mask"] for p in payloads])
        assert torch.equal(weight > 0, mask > 0)


def test_other_aggregations_reach_the_ranks_as_weights_too() -> None:
    group = NotingGroup(2, trained())
    make_actor(group, agg_mode="seq-mean-token-sum-norm", loss_scale_factor=100.0).update(make_batch(4))
    weight = torch.cat([p["weight"] for p in group.calls[0][2]])
    assert weight[weight > 0].tolist() == pytest.approx([1 / (4 * 100)] * 10)
    group = NotingGroup(2, trained())
    make_actor(group, agg_mode="prompt-mean-token-mean").update(make_batch(4))
    weight = torch.cat([p["weight"] for p in group.calls[0][2]])
    assert weight[weight > 0].tolist() == pytest.approx([1 / (2 * 5)] * 10)


def test_a_rank_gets_what_the_loss_needs_and_nothing_else() -> None:
    group = NotingGroup(2, trained())
    make_actor(group).update(make_batch(4))
    for payload in group.calls[0][2]:
        wanted = {"weight", "response_mask", "old_log_probs", "advantages"}
        assert payload.keys() == wanted | {"tokens", "lengths", "rows", "micro_sizes"}
        assert (payload["tokens"].dtype, payload["lengths"].dtype) == (torch.int32, torch.int64)
        assert int(payload["micro_sizes"].sum()) == len(payload["lengths"])
        assert torch.equal(payload["advantages"], payload["tokens"] + 0.5), "columns stay beside their tokens"
    assert len({len(p["micro_sizes"]) for p in group.calls[0][2]}) == 1, "equally many micro-batches"


def test_micro_batches_hold_no_more_than_the_packing_allows() -> None:
    group = NotingGroup(2, trained())
    make_actor(group).update(make_batch(4))
    for _, _, payloads in group.calls:
        for payload in payloads:
            parts = torch.tensor([len(s) for s in sequences(payload)]).split(payload["micro_sizes"].tolist())
            assert all(int(part.sum()) <= 10 for part in parts)
    batch, critic = make_batch(4), Critic("critic", group, Packing(max_tokens=None, max_sequences=1))  # type: ignore
    assert [p.micro_sizes for p in critic._plan(batch)[0]] == [[1] * 4] * 2


def test_statistics_are_merged_over_replicas_and_steps() -> None:
    group = NotingGroup(2, trained())
    _, stats = make_actor(group).update(make_batch(4))
    # Each step's weights sum to 1; replica 0 reports 1 and replica 1 reports 2, each for its tokens.
    shares = [float(p["weight"].sum()) for _, _, payloads in group.calls for p in payloads]
    expected = (shares[0] + 2 * shares[1] + shares[2] + 2 * shares[3]) / 2
    assert stats["actor/loss"].result() == pytest.approx(expected)
    assert stats["actor/loss"].weight == pytest.approx(2.0)
    assert stats["actor/largest"].result() == 5
    assert stats["actor/grad_norm"].result() == pytest.approx(2.5), "the mean of 2 and 3: once a step, not a replica"
    assert stats["actor/lr"].result() == 0.5
    assert stats["actor/skipped_steps"].result() == 0


def test_the_first_kl_is_that_of_the_first_step_alone() -> None:
    _, stats = make_actor(NotingGroup(2, trained([1e-9, 0.25]))).update(make_batch(4))
    assert stats["actor/first_ppo_kl"].result() == pytest.approx(1e-9)
    assert stats["actor/ppo_kl"].result() == pytest.approx((1e-9 + 0.25) / 2)


def noting(made: Callable[[int], bool] = lambda call: True) -> Callable[..., Reply]:
    """Answers of calls whose forward pass gives each token minus its number as its log-prob."""
    calls = {"replies": 0}

    def answer(method: str, arguments: dict[str, Any], payload: Payload, replica: int) -> Reply:
        found = {"log_probs": -payload["tokens"].float()} if len(payload["tokens"]) else {}
        if method == "columns":
            return Reply({}, found)
        call, calls["replies"] = calls["replies"] // 2, calls["replies"] + 1
        if not made(call):
            return not_made(math.inf, where=[None])
        reply = trained([0.0] * 9)(method, arguments, payload, replica)
        return replace(reply, tensors=found if arguments["notes"] else {})

    return answer


def without_old(num_groups: int) -> Batch:
    batch = make_batch(num_groups)
    return replace(batch, columns={name: c for name, c in batch.columns.items() if name != "old_log_probs"})


@pytest.mark.parametrize("num_groups", [1, 4])
def test_the_first_step_gives_the_old_log_probs_that_are_lacking(num_groups: int) -> None:
    group = NotingGroup(2, noting())
    batch, stats = make_actor(group, prompts_per_step=4, epochs=3).update(without_old(num_groups), seed=3)
    assert torch.equal(batch.columns["old_log_probs"], -batch.tokens.float()), "in the order of the batch"
    assert [call[1]["notes"] for call in group.calls] == [["log_probs"], [], []]
    (_, _, first), *later = group.calls
    assert not any("old_log_probs" in payload for payload in first)
    for _, _, payloads in later:
        assert all(torch.equal(payload["old_log_probs"], -payload["tokens"].float()) for payload in payloads)
    assert "actor/ppo_kl" in stats and "actor/first_ppo_kl" not in stats, "nothing was compared"


def test_with_bypass_they_are_noted_and_the_loss_reads_the_servers() -> None:
    group = NotingGroup(2, noting())
    batch = without_old(2).with_columns(rollout_log_probs=torch.arange(16) - 100.0)
    batch, stats = make_actor(group, bypass=True, epochs=2).update(batch)
    assert torch.equal(batch.columns["old_log_probs"], -batch.tokens.float())
    for _, _, payloads in group.calls:
        assert all(torch.equal(payload["old_log_probs"], payload["tokens"] - 100.0) for payload in payloads)
    assert "actor/first_ppo_kl" in stats, "the gap to the server"


def test_a_first_step_that_is_not_made_leaves_them_to_a_pass() -> None:
    """Its weights have not moved."""
    group = NotingGroup(2, noting(made=lambda call: call > 0))
    actor = make_actor(group, epochs=3)
    told: list[BadNumber] = []
    actor.on_bad = told.append
    batch, _ = actor.update(without_old(2))
    assert len(told) == 1
    assert [method for method, *_ in group.calls] == ["update", "columns", "update", "update"]
    assert torch.equal(batch.columns["old_log_probs"], -batch.tokens.float())
    nothing = without_old(2).with_columns(response_mask=torch.zeros(16))
    group = NotingGroup(2, noting())
    batch, _ = make_actor(group).update(nothing)
    assert [method for method, *_ in group.calls] == ["columns"]
    assert torch.equal(batch.columns["old_log_probs"], -batch.tokens.float())


def test_with_several_steps_a_pass_before_gives_those_of_the_others() -> None:
    batch, group = without_old(6), NotingGroup(2, noting())
    actor = make_actor(group, epochs=2)
    later = actor.later_old_log_probs(batch, seed=3)
    assert later is not None
    ((_, _, scored),) = group.calls
    rest = {t for payload in scored for t in payload["tokens"].tolist()}
    assert len(rest) == 4 * 8
    assert later.tolist() == [-float(t) if t in rest else 0.0 for t in range(48)]
    batch, _ = actor.update(batch, seed=3, later=later)
    (_, _, first), *others = group.calls[1:]
    assert {t for payload in first for t in payload["tokens"].tolist()} == set(range(48)) - rest
    assert [call[1]["notes"] for call in group.calls[1:]] == [["log_probs"], *[[]] * 5]
    for _, _, payloads in others:
        assert all(torch.equal(payload["old_log_probs"], -payload["tokens"].float()) for payload in payloads)
    assert torch.equal(batch.columns["old_log_probs"], -batch.tokens.float())


def test_a_single_step_needs_no_pass_before() -> None:
    group = NotingGroup(2, noting())
    assert make_actor(group).later_old_log_probs(without_old(2), seed=3) is None
    assert not group.calls


def test_a_step_without_a_trainable_token_is_skipped_and_counted() -> None:
    batch = make_batch(4)
    mask = batch.columns["response_mask"].clone()
    mask[:24] = 0  # three of the four groups
    group = NotingGroup(2, trained([1e-9, 0.25]))
    prepared: list[Batch] = []

    def prepare(step: Batch) -> Batch:
        prepared.append(step)
        return step

    _, stats = make_actor(group, prompts_per_step=1).update(batch.with_columns(response_mask=mask), prepare=prepare)
    assert len(group.calls) == len(prepared) == 1
    assert group.calls[0][1]["num_tokens"] == 8
    assert stats["actor/skipped_steps"].result() == 3
    assert stats["actor/first_ppo_kl"].result() == pytest.approx(1e-9), "of the first step that was taken"


def test_a_batch_without_a_trainable_token_asks_nothing_of_the_ranks() -> None:
    group = NotingGroup(2, trained())
    batch = make_batch(2).with_columns(response_mask=torch.zeros(16))
    assert make_actor(group).update(batch)[1] == {"actor/skipped_steps": Stat("sum", 1.0)}
    assert group.calls == []


def test_a_replica_without_sequences_runs_dummies() -> None:
    batch, group = make_batch(1).select([0]), NotingGroup(2, trained())
    make_actor(group).update(batch)
    full, empty = sorted(group.calls[0][2], key=lambda p: -len(p["tokens"]))
    assert full["micro_sizes"].tolist() == [1]
    assert empty["micro_sizes"].tolist() == [0]
    assert {name: len(tensor) for name, tensor in empty.items()} == dict.fromkeys(empty, 0) | {"micro_sizes": 1}


def test_a_critic_trains_with_its_own_loss_and_names() -> None:
    group = NotingGroup(2, trained())
    update = Update(CriticLoss(0.5), prompts_per_step=4)
    critic = Critic("critic", group, Packing(), update_settings=update)  # type: ignore[arg-type]
    _, stats = critic.update(make_batch(4))
    arguments, payloads = group.calls[0][1], group.calls[0][2]
    assert arguments["loss"] == {"cliprange_value": 0.5}
    assert (arguments["names"], arguments["temperature"]) == (["values"], 1.0)
    assert {"values", "returns"} <= payloads[0].keys()
    assert "critic/grad_norm" in stats
    assert not any("ppo_kl" in name for name in stats)


def test_columns_come_back_in_the_order_of_the_batch() -> None:
    """Each replica answers with its tokens: the column is the batch's own tokens again."""

    def answer(method: str, arguments: dict[str, Any], payload: Payload, replica: int) -> Reply:
        assert method == "columns"
        assert payload.keys() == {"tokens", "lengths", "rows", "micro_sizes"}, "a forward pass needs no columns"
        return Reply({}, {name: payload["tokens"].float() for name in ("log_probs", "values")})

    batch = make_batch(3).select([4, 0, 3, 1, 2])
    for num_replicas in (1, 2, 3):
        group: Any = NotingGroup(num_replicas, answer)
        assert torch.equal(Reference("ref", group, Packing(max_tokens=8), 0.7).log_probs(batch), batch.tokens.float())
        assert torch.equal(make_actor(group).log_probs(batch), batch.tokens.float())
        assert torch.equal(Critic("critic", group, Packing()).values(batch), batch.tokens.float())
        assert [call[1]["role"] for call in group.calls] == ["ref", "actor", "critic"]
        assert [call[1]["temperature"] for call in group.calls] == [0.7, 0.7, 1.0]
        assert [call[1]["names"] for call in group.calls] == [["log_probs"], ["log_probs"], ["values"]]


def test_several_columns_come_from_one_pass() -> None:
    def answer(method: str, arguments: dict[str, Any], payload: Payload, replica: int) -> Reply:
        tokens = payload["tokens"].float()
        return Reply({}, {name: tokens + at for at, name in enumerate(arguments["names"])})

    batch, group = make_batch(3), NotingGroup(2, answer)
    found = make_actor(group).columns(batch, ("log_probs", "sum_pi_squared", "full_kl"), reference="ref")
    assert {name: column.tolist() for name, column in found.items()} == {
        name: (batch.tokens + at).tolist() for at, name in enumerate(("log_probs", "sum_pi_squared", "full_kl"))
    }
    assert [call[1]["reference"] for call in group.calls] == ["ref"]


def test_a_full_kl_is_asked_of_the_actor_and_its_reference() -> None:
    group = NotingGroup(2, trained())
    loss = ActorLoss("ppo", use_kl_loss=True, kl_loss_type="full")
    make_actor(group, loss=loss, reference="ref").update(make_batch(4))
    arguments, payloads = group.calls[0][1], group.calls[0][2]
    assert (arguments["names"], arguments["reference"]) == (["log_probs", "entropy", "full_kl"], "ref")
    assert "ref_log_probs" not in payloads[0]


def test_what_is_rejected_leaves_weights_and_masks_of_its_step() -> None:
    batch = make_batch(2)
    keep = torch.ones(16)
    keep[5] = 0  # one of the five trainable tokens of the first group
    group = NotingGroup(2, trained())
    make_actor(group).update(batch.with_columns(keep=keep))
    weights = torch.cat([p["weight"] for p in group.calls[0][2]])
    tokens = torch.cat([p["tokens"] for p in group.calls[0][2]])
    assert weights[tokens == 5] == 0
    assert weights[weights > 0].tolist() == pytest.approx([1 / 9] * 9)
    assert torch.equal(weights > 0, torch.cat([p["response_mask"] for p in group.calls[0][2]]) > 0)


def test_the_weights_of_rollout_correction_have_mean_1_in_each_step() -> None:
    batch = make_batch(4).with_columns(rollout_weight=torch.arange(32) + 1.0)
    group = NotingGroup(2, trained())
    make_actor(group, loss=ActorLoss(use_rollout_weight=True), normalize=True).update(batch)
    for _, _, payloads in group.calls:
        weights, mask = (torch.cat([p[name] for p in payloads]) for name in ("rollout_weight", "response_mask"))
        assert float(weights[mask > 0].mean()) == pytest.approx(1.0)


def test_bypass_puts_the_servers_log_probs_in_the_place_of_the_old_ones() -> None:
    batch = make_batch(2).with_columns(rollout_log_probs=torch.arange(16) - 100.0)
    group = NotingGroup(2, trained())
    make_actor(group, bypass=True).update(batch)
    for payload in group.calls[0][2]:
        assert torch.equal(payload["old_log_probs"], payload["tokens"] - 100.0)


def test_a_selection_is_drawn_anew_for_each_step_and_again_for_the_same_seed() -> None:
    batch = make_batch(8).with_columns(
        old_log_probs=torch.linspace(-9, 0, 64) ** 3, advantages=torch.linspace(-1, 1, 64) ** 3
    )
    how = {"loss": ActorLoss("clip_cov", args={"clip_cov_ratio": 0.2, "clip_cov_lb": -1e9, "clip_cov_ub": 1e9})}
    drawn = []
    for seed in (1, 1, 2):
        group = NotingGroup(1, trained())
        make_actor(group, prompts_per_step=8, epochs=2, **how).update(batch, seed=seed)
        chosen = [
            frozenset(p["tokens"][p["selected"] > 0].tolist()) for _, _, payloads in group.calls for p in payloads
        ]
        assert {len(c) for c in chosen} == {8}, "a fifth of the 40 trainable tokens"
        drawn.append(chosen)
    assert drawn[0] == drawn[1]
    assert len({*drawn[0], *drawn[2]}) == 4


def not_made(norm: float = math.nan, **more: Any) -> Reply:
    """The answer of an update whose step was not made."""
    return Reply({"stats": {}, "grad_norm": norm, "lr": 0.5, "loss": 0.0, "made": False, "bad": None, **more}, {})


@pytest.mark.parametrize("details", [{"sequence": 2, "column": "log_probs", "token": 1, "value": 7.0}])
def test_a_number_that_is_not_finite_is_found_again_in_the_batch(details: dict[str, Any]) -> None:
    """The rank counts in its own share of a shuffled step, the driver in its batch."""
    where: list[list[int]] = []
    shown: list[list[int]] = []

    def answer(method: str, arguments: dict[str, Any], payload: Payload, replica: int) -> Reply:
        shown.extend(sequences(payload))
        if replica == 1:
            where.extend(sequences(payload))
        return not_made(bad=details if replica == 1 else None)

    batch = make_batch(8)
    with pytest.raises(NonFiniteError, match="log_probs is 7.0 at token 1 of sequence") as caught:
        make_actor(NotingGroup(2, answer), prompts_per_step=4).update(batch, seed=3)
    assert batch.split(batch.tokens)[caught.value.sequence].tolist() == where[2]
    assert caught.value.role == "actor"
    assert caught.value.groups == tuple(sorted({sequence[0] // 8 for sequence in shown}))


def test_a_step_that_was_not_made_has_no_statistics_and_the_next_one_comes() -> None:
    """Of two mini-batches the first; whoever is told may raise, or not."""
    told: list[BadNumber] = []

    def answer(method: str, arguments: dict[str, Any], payload: Payload, replica: int) -> Reply:
        if len(group.calls) == 1:
            return not_made(math.inf, where=[None, "decoder.layers.0.weight", "decoder.layers.0.weight"])
        return whole(method, arguments, payload, replica)

    whole, group = trained(), NotingGroup(2, answer)
    actor = make_actor(group)
    actor.on_bad = told.append
    _, stats = actor.update(make_batch(4))
    assert len(group.calls) == 2
    assert stats["actor/loss"].weight == pytest.approx(1.0), "of the second step alone"
    assert stats["actor/skipped_steps"].result() == 0, "these are the steps without a trainable token"
    (found,) = told
    ranks = "on ranks 1, 2, first in decoder.layers.0.weight"
    assert str(found) == f"the gradient norm of actor is inf ({ranks}): expected a finite number"
    shown = {t // 8 for payload in group.calls[0][2] for t in payload["tokens"].tolist()}
    assert set(found.groups) == shown and len(shown) == 2
    with pytest.raises(BadNumber, match="^the gradient norm of actor is nan .float32 cannot hold it"):
        make_actor(NotingGroup(1, lambda *_: not_made(where=[None]))).update(make_batch(1))


def test_limits_follow_from_the_steps_that_were_made() -> None:
    """Norms 2, 3, 2, 3, ... and losses of -1, which are all equal: no limit."""
    group = NotingGroup(1, lambda *_: Reply({**not_made(2.0 + len(group.calls) % 2).result, "made": True}, {}))
    actor = make_actor(group, prompts_per_step=1)
    actor.spikes = Spikes(4.0, 1.0)
    for _ in range(5):
        actor.update(make_batch(4))
    limits = [call[1]["limits"] for call in group.calls]
    assert limits[:16] == [{"grad_norm": None, "loss": None}] * 16
    deviation = math.sqrt(16 * 0.25 / 15)
    assert limits[16] == {"grad_norm": pytest.approx(2.5 + 4 * deviation), "loss": None}
    group.answer = lambda *_: not_made(9.0)
    told: list[BadNumber] = []
    actor.on_bad = told.append
    actor.update(make_batch(1))
    assert str(told[0]).startswith("the gradient norm of actor is 9, a spike: over the last 20 steps its mean is 2.5 ")


def test_other_errors_of_ranks_stay_what_they_are() -> None:
    def answer(method: str, arguments: dict[str, Any], payload: Payload, replica: int) -> Reply:
        raise RankError("out of memory")

    with pytest.raises(RankError, match="^out of memory$"):
        make_actor(NotingGroup(2, answer)).update(make_batch(4))


def test_a_replica_that_ran_dummies_only_answers_with_no_column() -> None:
    def answer(method: str, arguments: dict[str, Any], payload: Payload, replica: int) -> Reply:
        tokens = torch.stack([payload["tokens"], payload["tokens"]], 1)
        return Reply({}, {"log_probs": tokens} if len(tokens) else {})

    batch = make_batch(1).select([1])
    group: Any = NotingGroup(3, answer)
    found = make_actor(group).log_probs(batch)
    assert found.dtype == torch.int32, "the replica's, not that of an empty tensor beside it"
    assert found.tolist() == [[t, t] for t in batch.tokens.tolist()]


def test_a_column_that_nobody_knows_is_sent_where_it_is_asked_for() -> None:
    """As it is, with its sequences; a call that does not name it does not send it."""
    batch = make_batch(3)
    routes = (batch.tokens[:, None, None] * torch.tensor([[1, 2], [3, 4]])).to(torch.uint16)
    batch = batch.with_columns(routes=routes)
    group = NotingGroup(2, trained())
    make_actor(group).update(batch)
    assert not any("routes" in payload for payload in group.calls[0][2])
    part = RankPlan([4, 0, 5], [1, 0, 2])
    sent = payload_of(batch, part, ("routes", "advantages"))
    assert sent.keys() == {"tokens", "lengths", "rows", "micro_sizes", "routes", "advantages"}
    assert sent["routes"].dtype == torch.uint16
    assert torch.equal(sent["routes"].long(), sent["tokens"][:, None, None] * torch.tensor([[1, 2], [3, 4]]))
    with pytest.raises(AssertionError, match="no column may be called tokens, lengths, rows, micro_sizes"):
        payload_of(batch.with_columns(lengths=torch.zeros(24)), part, ("lengths",))


def test_a_sequence_longer_than_a_row_is_refused() -> None:
    group: Any = NotingGroup(1, trained())
    with pytest.raises(ValueError, match=r"^ppo_max_token_len_per_gpu=4: sequence 1 has 5 tokens; expected"):
        Reference("ref", group, Packing(max_tokens=4)).log_probs(make_batch(1))


@pytest.mark.parametrize(
    ("asked", "device", "can_share", "shares"),
    [
        ("auto", "cpu", True, True),
        ("auto", "cuda", True, False),
        ("on", "cpu", True, True),
        ("on", "cuda", True, True),
        ("off", "cpu", True, False),
        ("auto", "cpu", False, False),
        ("on", "cpu", False, None),
        ("on", "cuda", False, None),
    ],
)
def test_prefixes_are_shared_where_the_ranks_can_and_refused_where_it_is_asked_for_and_they_cannot(
    asked: str, device: str, *, can_share: bool, shares: bool | None
) -> None:
    said = LOADED | {"can_share": can_share, "device": device}
    group: Any = NotingGroup(1, lambda *_: Reply(said, {}))
    role = Reference("ref", group, Packing(share_prefixes=asked))
    if shares is None:
        with pytest.raises(
            ValueError, match="^trainer.share_prefixes=on: the ranks of ref cannot; expected auto or off"
        ):
            role.load("folder")
        return
    role.load("folder")
    assert role.shares_prefixes is shares


@pytest.mark.parametrize(
    ("asked", "given", "sent"),
    [
        ("on", None, {"transformer_impl": "local"}),
        ("on", {"transformer_impl": "auto", "strategy": "fsdp"}, {"transformer_impl": "local", "strategy": "fsdp"}),
        ("on", {"transformer_impl": "transformer_engine"}, {"transformer_impl": "transformer_engine"}),
        ("auto", {"transformer_impl": "auto"}, {"transformer_impl": "auto"}),
    ],
)
def test_layers_are_local_where_prefixes_must_be_shared(
    asked: str, given: dict[str, Any] | None, sent: dict[str, Any]
) -> None:
    group: Any = NotingGroup(1, lambda *_: Reply(LOADED | {"can_share": True}, {}))
    Reference("ref", group, Packing(share_prefixes=asked)).load("folder", engine=given)
    assert group.calls[0][1]["engine"] == sent


def test_the_share_of_places_that_are_computed_is_told() -> None:
    """Rows of 10 tokens, 8 in common: one whole; of the other 2, the last common one, and one for a cut."""
    lengths = torch.tensor([10, 10])
    tokens = torch.tensor([*range(8), 20, 21, *range(8), 30, 31])
    mask = torch.tensor([*[0.0] * 8, 1.0, 1.0] * 2)
    columns = {name: torch.ones(20) for name in ("old_log_probs", "advantages")} | {"response_mask": mask}
    batch = Batch(tokens, lengths, columns, {"group": torch.zeros(2, dtype=torch.int64), "score": torch.zeros(2)})
    for shares, share in ((True, (10 + 4) / 20), (False, 1.0)):
        actor = make_actor(NotingGroup(1, trained()))
        actor.packing, actor.shares_prefixes = Packing(max_tokens=40, share_prefixes="auto"), shares
        _, stats = actor.update(batch)
        assert stats["actor/computed_share"].result() == pytest.approx(share)


def test_plain_numbers_travel_to_the_ranks() -> None:
    def answer(method: str, arguments: dict[str, Any], payload: Payload, replica: int) -> Reply:
        return Reply(
            LOADED if method == "load" else {"version": 3},
            {},
        )

    group: Any = NotingGroup(1, answer)
    actor = make_actor(group)
    assert actor.load("folder", dtype="bfloat16", optim={"lr": 0.1}, plugins=("mine.py",)) == 7
    assert actor.hidden_size == 16, "for packing"
    actor.connect(PushSettings(("http://a",), "secret", pause_mode="in_place"))
    assert actor.push(3) == {"version": 3}
    actor.save(Path("x"))
    actor.restore(Path("x"))
    actor.export(Path("y"))
    Critic("critic", group, Packing()).load("folder")
    methods = [method for method, _, _ in group.calls]
    assert methods == ["load", "connect", "push", "save", "restore", "export", "load"]
    load, connect = group.calls[0][1], group.calls[1][1]
    assert load == {
        "role": "actor", "kind": "actor", "folder": "folder", "dtype": "bfloat16", "optim": {"lr": 0.1}, "lora": None,
        "plugins": ["mine.py"], "engine": {}, "reads_weights": True, "base": None, "router_replay": False,
    }  # fmt: skip
    assert connect["role"] == "actor"
    assert (connect["settings"]["urls"], connect["settings"]["pause_mode"]) == (("http://a",), "in_place")
    assert [call[1]["folder"] for call in group.calls[3:6]] == ["x", "x", "y"]
    assert group.calls[6][1]["kind"] == "critic"
    assert group.calls[6][1]["optim"] is None


def test_the_settings_of_pushes_are_sent_once() -> None:
    group: Any = NotingGroup(1, lambda *_: Reply({"version": 3}, {}))
    actor = make_actor(group)
    actor.connect(PushSettings(("http://a", "http://b"), "secret"))
    actor.push(3, only=["http://a"], canary={"prompt_ids": [5]})
    actor.push(4)
    assert [call[:2] for call in group.calls[1:]] == [
        ("push", {"role": "actor", "version": 3, "only": ["http://a"], "canary": {"prompt_ids": [5]}}),
        ("push", {"role": "actor", "version": 4, "only": None, "canary": None}),
    ]


def test_weights_that_are_not_finite_are_told_as_a_bad_number() -> None:
    group: Any = NotingGroup(2, lambda *_: Reply({"where": [None, "decoder.final_layernorm.weight"]}, {}))
    sentence = "^a weight of actor is not finite .on rank 1, first in decoder.final_layernorm.weight.: no server gets "
    with pytest.raises(BadNumber, match=sentence):
        make_actor(group).push(3)


def test_payloads_of_a_plan_rebuild_the_batch() -> None:
    """Laid end to end in the plans' order they are the batch: nothing is lost or doubled."""
    batch, group = make_batch(4), NotingGroup(3, trained())
    make_actor(group, prompts_per_step=4).update(batch)
    payloads = group.calls[0][2]
    got = sorted(sequence for payload in payloads for sequence in sequences(payload))
    expected = [batch.tokens[token_positions(batch.lengths, torch.tensor([i]))].tolist() for i in range(8)]
    assert got == sorted(expected)


def in_rows(num_groups: int = 4) -> Batch:
    """`make_batch` with the second sample of each group cut into rows of 3 and 2 tokens."""
    batch = make_batch(num_groups)
    lengths, rows = torch.tensor([3, 3, 2] * num_groups), torch.tensor([1, 2] * num_groups)
    return replace(batch, lengths=lengths, rows=rows)


def micros_of(payload: Payload) -> list[list[int]]:
    """The tokens of each micro-batch."""
    batch = Batch(payload["tokens"], payload["lengths"], rows=payload["rows"])
    ends = payload["micro_sizes"].cumsum(0).tolist()
    sizes = payload["micro_sizes"].tolist()
    return [batch.select(range(end - n, end)).tokens.tolist() for end, n in zip(ends, sizes, strict=True)]


def test_rows_part_for_a_loss_that_looks_at_its_token_and_stay_together_for_one_that_looks_at_the_sample() -> None:
    for name, is_together in (("ppo", False), ("gspo", True), ("gmpo", True)):
        group = NotingGroup(2, trained())
        make_actor(group, loss=ActorLoss(name)).update(in_rows())
        for _, arguments, payloads in group.calls:
            assert arguments["num_tokens"] == 16
            micros = [micro for payload in payloads for micro in micros_of(payload)]
            assert sorted(token for micro in micros for token in micro) == sorted(
                token for payload in payloads for token in payload["tokens"].tolist()
            )
            assert all(len(micro) <= 10 for micro in micros)
            assert {int(n) for payload in payloads for n in payload["rows"]} == ({1, 2} if is_together else {1})
            for start in range(0, 32, 8):  # a group's second sample is tokens 3 to 7 of its 8
                holders = [micro for micro in micros if {*range(start + 3, start + 8)} & {*micro}]
                assert len(holders) <= 1 or not is_together


def test_the_weights_of_tokens_are_those_of_samples_however_rows_are_packed() -> None:
    """Each of the 4 samples of a step has a quarter, whatever its rows."""
    for loss in (ActorLoss("ppo"), ActorLoss("gspo")):
        group = NotingGroup(2, trained())
        make_actor(group, loss=loss, agg_mode="seq-mean-token-mean").update(in_rows())
        for _, _, payloads in group.calls:
            weights = dict(
                zip(*(torch.cat([p[n] for p in payloads]).tolist() for n in ("tokens", "weight")), strict=True)
            )
            for start in {token // 8 * 8 for token in weights}:
                assert sum(weights[start + i] for i in range(3)) == pytest.approx(0.25)
                assert sum(weights[start + i] for i in range(3, 8)) == pytest.approx(0.25)


def test_columns_of_rows_come_back_in_the_order_of_the_batch() -> None:
    def answer(method: str, arguments: dict[str, Any], payload: Payload, replica: int) -> Reply:
        assert payload["rows"].tolist() == [1] * len(payload["lengths"]), "a forward pass may part them"
        return Reply({}, {"log_probs": payload["tokens"].float()})

    batch = in_rows(3).select([4, 0, 3, 1, 2])
    for num_replicas in (1, 2, 3):
        group: Any = NotingGroup(num_replicas, answer)
        assert torch.equal(make_actor(group).log_probs(batch), batch.tokens.float())


def test_a_sample_whose_rows_do_not_fit_together_is_refused_for_a_ratio_of_the_sample_only() -> None:
    batch = in_rows(1)
    group: Any = NotingGroup(1, trained())
    for name in ("gspo", "ppo"):
        actor = make_actor(group, loss=ActorLoss(name))
        actor.packing = Packing(max_tokens=4)
        if name == "ppo":
            actor.update(batch)
            continue
        with pytest.raises(ValueError, match=r"^actor.ppo_max_token_len_per_gpu=4: .*policy_loss_fn=gspo .* 5 tokens"):
            actor.update(batch)
    assert len(group.calls) == 1


@pytest.mark.parametrize("loss", ["ppo", "gspo"])
def test_a_number_that_is_not_finite_is_found_again_in_a_row_of_its_sample(loss: str) -> None:
    """Token 6 of the batch: token 3 of the second sample, the first of its second row."""

    def answer(method: str, arguments: dict[str, Any], payload: Payload, replica: int) -> Reply:
        if 6 not in payload["tokens"].tolist():
            return not_made()
        sent = Batch(payload["tokens"], payload["lengths"], rows=payload["rows"])
        place = payload["tokens"].tolist().index(6)
        sequence = int(sent.segment_ids[place])
        token = place - int((sent.segment_ids < sequence).sum())
        return not_made(bad={"sequence": sequence, "token": token, "column": "log_probs", "value": 7.0})

    with pytest.raises(NonFiniteError, match="log_probs is 7.0 at token 3 of sequence 1 ") as caught:
        make_actor(NotingGroup(2, answer), loss=ActorLoss(loss), prompts_per_step=4).update(in_rows(), seed=3)
    assert (caught.value.sequence, caught.value.token) == (1, 3)


def test_columns_that_the_passes_read_go_with_every_call() -> None:
    """The log-probs' pass, and each optimizer step; but not with one that shall not read them."""

    def answer(method: str, arguments: dict[str, Any], payload: Payload, replica: int) -> Reply:
        if method == "update":
            return trained()(method, arguments, payload, replica)
        return Reply({}, {"log_probs": payload["tokens"].float()})

    group: Any = NotingGroup(2, answer)
    actor = replace(make_actor(group), inputs=("some",))
    batch = make_batch(4)
    some = torch.arange(32 * 6, dtype=torch.uint8).view(32, 2, 3)
    assert actor.log_probs(batch, inputs=()).tolist() == batch.tokens.tolist()
    actor.log_probs(batch.with_columns(some=some))
    actor.update(batch.with_columns(some=some))
    without, given, *steps = group.calls
    assert not any("some" in payload for payload in without[2])
    for _, _, payloads in (given, *steps):
        for payload in payloads:
            assert torch.equal(payload["some"], some[payload["tokens"].long()]), "those of its tokens"
    assert len(steps) == 2


def test_a_batch_without_a_column_that_passes_read_is_refused() -> None:
    """But for the pass that computes this column."""

    def answer(method: str, arguments: dict[str, Any], payload: Payload, replica: int) -> Reply:
        return Reply({}, {name: payload["tokens"].float() for name in arguments["names"]})

    group: Any = NotingGroup(2, answer)
    actor = replace(make_actor(group), inputs=("some",))
    assert set(actor.columns(make_batch(4), ("log_probs", "some"))) == {"log_probs", "some"}
    for read in (actor.log_probs, actor.update):
        with pytest.raises(ValueError, match="^role actor reads the column some of tokens: expected a batch that has"):
            read(make_batch(4))
