"""What the driver's handles ask of a group besides updates: models, columns, pushes."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from noting_group import NotingGroup, Payload, in_rows, make_actor, make_batch, trained

from megarl.algo.finite import BadNumber
from megarl.data.packing import RankPlan
from megarl.group import Reply
from megarl.roles import messages
from megarl.roles.handles import Critic, Role
from megarl.roles.handles import payload as payload_of
from megarl.roles.settings import LoadSettings, Packing
from megarl.weights.push.report import PushReport
from megarl.weights.push.settings import PushSettings
from megarl.weights.verify.canary import Canary

LOADED: dict[str, Any] = {  # what a rank says of a model that it has loaded
    "hidden_size": 16,
    "lacks_transformer_engine": "",
    "can_share": False,
    "device": "cpu",
}
REPORT = PushReport(3, 40, 2_400_000, 80, {"http://a": "shared"}, {}, {}, [], {"send": 0.5})


@pytest.mark.parametrize("make", [make_batch, in_rows])
@pytest.mark.parametrize("num_replicas", [1, 2, 3])
def test_columns_come_back_in_the_order_of_the_batch(make: Any, num_replicas: int) -> None:
    """Each replica answers with its tokens: the column is the batch's own tokens again.  Rows may part."""
    batch = make(3).select([4, 0, 3, 1, 2])
    group: Any = NotingGroup(num_replicas, trained())
    assert torch.equal(Role("ref", group, Packing(max_tokens=8), 0.7).log_probs(batch), batch.tokens.float())
    assert torch.equal(make_actor(group).log_probs(batch), batch.tokens.float())
    assert torch.equal(Critic("critic", group, Packing()).values(batch), batch.tokens.float())
    assert [call[0].role for call in group.calls] == ["ref", "actor", "critic"]
    assert [call[0].temperature for call in group.calls] == [0.7, 0.7, 1.0]
    assert [call[0].names for call in group.calls] == [("log_probs",), ("log_probs",), ("values",)]
    for payload in (payload for call in group.calls for payload in call[1]):
        assert payload.keys() == {"tokens", "lengths", "rows", "micro_sizes"}, "a forward pass needs no columns"
        assert payload["rows"].tolist() == [1] * len(payload["lengths"])
    names = ("log_probs", "sum_pi_squared", "full_kl")  # in one pass
    found = make_actor(group).columns(batch, names, reference="ref")
    assert all(torch.equal(found[name], batch.tokens.float() + at) for at, name in enumerate(names))
    assert [call[0].reference for call in group.calls[3:]] == ["ref"]


def test_a_replica_that_ran_dummies_only_answers_with_no_column() -> None:
    def answer(message: Any, payload: Payload, replica: int) -> Reply:
        tokens = torch.stack([payload["tokens"], payload["tokens"]], 1)
        return Reply({}, {"log_probs": tokens} if len(tokens) else {})

    batch = make_batch(1).select([1])
    found = make_actor(NotingGroup(3, answer)).log_probs(batch)
    assert found.dtype == torch.int32, "the replica's, not that of an empty tensor beside it"
    assert found.tolist() == [[t, t] for t in batch.tokens.tolist()]


def test_a_column_that_nobody_knows_is_sent_where_it_is_asked_for() -> None:
    """As it is, with its sequences; a call that does not name it does not send it."""
    batch = make_batch(3)
    routes = (batch.tokens[:, None, None] * torch.tensor([[1, 2], [3, 4]])).to(torch.uint16)
    batch, part = batch.with_columns(routes=routes), RankPlan([4, 0, 5], [1, 0, 2])
    sent = payload_of(batch, part, ("routes", "advantages"))
    assert sent.keys() == {"tokens", "lengths", "rows", "micro_sizes", "routes", "advantages"}
    assert sent["routes"].dtype == torch.uint16
    assert torch.equal(sent["routes"].long(), sent["tokens"][:, None, None] * torch.tensor([[1, 2], [3, 4]]))
    with pytest.raises(AssertionError, match="no column may be called tokens, lengths, rows, micro_sizes"):
        payload_of(batch.with_columns(lengths=torch.zeros(24)), part, ("lengths",))


def test_columns_that_the_passes_read_go_with_every_call() -> None:
    """The log-probs' pass, and each optimizer step; but not with one that shall not read them."""
    group = NotingGroup(2, trained())
    actor, batch = replace(make_actor(group), inputs=("some",)), make_batch(4)
    some = torch.arange(32 * 6, dtype=torch.uint8).view(32, 2, 3)
    assert actor.log_probs(batch, inputs=()).tolist() == batch.tokens.tolist()
    assert not any("some" in payload for payload in group.calls[0][1])
    actor.log_probs(batch.with_columns(some=some))
    actor.update(batch.with_columns(some=some))
    assert group.methods == ["columns", "columns", "update", "update"]
    for call in (1, 2, 3):
        assert torch.equal(group.sent("some", call), some[group.sent("tokens", call).long()]), "those of its tokens"


def test_a_batch_without_a_column_that_passes_read_is_refused() -> None:
    """But for the pass that computes this column."""
    actor = replace(make_actor(NotingGroup(2, trained())), inputs=("some",))
    assert set(actor.columns(make_batch(4), ("log_probs", "some"))) == {"log_probs", "some"}
    for read in (actor.log_probs, actor.update):
        with pytest.raises(ValueError, match="^role actor reads the column some of tokens: expected a batch that has"):
            read(make_batch(4))


def test_a_sequence_longer_than_a_row_is_refused() -> None:
    group: Any = NotingGroup(1, trained())
    with pytest.raises(ValueError, match=r"^ppo_max_token_len_per_gpu=4: sequence 1 has 5 tokens; expected"):
        Role("ref", group, Packing(max_tokens=4)).log_probs(make_batch(1))


@pytest.mark.parametrize(
    ("asked", "device", "can_share", "shares"),
    [
        ("auto", "cpu", True, True),
        ("auto", "cuda", True, False),
        ("on", "cuda", True, True),
        ("off", "cpu", True, False),
        ("auto", "cpu", False, False),
        ("on", "cpu", False, None),
    ],
)
def test_prefixes_are_shared_where_the_ranks_can_and_refused_where_it_is_asked_for_and_they_cannot(
    asked: str, device: str, *, can_share: bool, shares: bool | None
) -> None:
    said = LOADED | {"can_share": can_share, "device": device}
    group: Any = NotingGroup(1, lambda *_: Reply(said, {}))
    role = Role("ref", group, Packing(share_prefixes=asked))
    if shares is None:
        with pytest.raises(ValueError, match="^trainer.share_prefixes=on: the ranks of ref cannot; expected auto or"):
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
    Role("ref", group, Packing(share_prefixes=asked)).load("folder", LoadSettings(engine=given or {}))
    assert group.calls[0][0].settings.engine == sent


def test_plain_numbers_travel_to_the_ranks_and_the_settings_of_pushes_once() -> None:
    group: Any = NotingGroup(1, lambda message, *_: Reply(LOADED if message.method() == "load" else asdict(REPORT), {}))
    actor = make_actor(group)
    actor.load("folder", (settings := LoadSettings("bfloat16", optim={"lr": 0.1}, plugins=("mine.py",))))
    assert actor.hidden_size == 16, "for packing"
    actor.connect(pushes := PushSettings(("http://a", "http://b"), "secret", pause_mode="in_place"))
    assert actor.push(3, only=["http://a"], canary=Canary((5,), (-0.5,))) == REPORT
    actor.push(4)
    actor.save(Path("x"))
    actor.restore(Path("x"))
    actor.export(Path("y"))
    Critic("critic", group, Packing()).load("folder")
    assert [message for message, _ in group.calls] == [
        messages.Load("actor", "actor", "folder", settings),
        messages.Connect("actor", pushes),
        messages.Push("actor", 3, ("http://a",), Canary((5,), (-0.5,))),
        messages.Push("actor", 4, None, None),
        messages.Save("actor", "x", in_background=False),
        messages.Restore("actor", "x"),
        messages.Export("actor", "y", adapter=None),
        messages.Load("critic", "critic", "folder", LoadSettings()),
    ]


def test_weights_that_are_not_finite_are_told_as_a_bad_number() -> None:
    group = NotingGroup(2, lambda *_: Reply({"where": [None, "decoder.final_layernorm.weight"]}, {}))
    sentence = "^a weight of actor is not finite .on rank 1, first in decoder.final_layernorm.weight.: no server gets "
    with pytest.raises(BadNumber, match=sentence):
        make_actor(group).push(3)
