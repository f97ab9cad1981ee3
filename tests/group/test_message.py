"""A call as a value: its name, and its way as JSON."""

import json
from dataclasses import asdict
from typing import Any

import pytest

from megarl.algo.distillation import Distillation
from megarl.algo.loss import ActorLoss, CriticLoss
from megarl.algo.spikes import Limits
from megarl.arch.layout import Layout
from megarl.group.message import Message, Setup, decoded
from megarl.roles import messages
from megarl.roles.settings import LoadSettings
from megarl.roles.worker import Worker
from megarl.samples.batch import Stat
from megarl.weights.push.settings import PushSettings
from megarl.weights.verify.canary import Canary

UPDATE = messages.Update("actor", 0.7, True, None, ActorLoss(), num_tokens=9, limits=Limits(1.5), notes=("log_probs",))


@pytest.mark.parametrize(
    "sent",
    [
        UPDATE,
        messages.Update("critic", 1.0, False, None, CriticLoss(None), num_tokens=9, limits=None, notes=()),
        messages.Update("actor", 1.0, False, "ref", ActorLoss(distillation=Distillation("jsd")), 9, None, ()),
        Setup(Layout(tp=2, etp=1), "cuda", 3, 60.0),
        messages.Load("actor", "actor", "folder", LoadSettings(optim={"lr": 0.1}, engine={"strategy": "fsdp"})),
        messages.Connect("actor", PushSettings(("http://a",), "secret", gpus={"trainer": ["0/0"], "servers": {}})),
        messages.Push("actor", 3, ("http://a",), Canary((5, 6), (-0.5,))),
        messages.Push("actor", 3, None, None),
        messages.Updated({"actor/loss": Stat("mean", 2.0, 4.0)}, 1.0, 0.1, 0.5, True, {"token": 3}, [None, "weight"]),
    ],
)
def test_a_rank_gets_what_the_driver_made(sent: Any) -> None:
    assert decoded(type(sent), json.loads(json.dumps(asdict(sent)))) == sent


def test_a_field_that_is_missing_or_unknown_is_refused() -> None:
    plain = asdict(UPDATE)
    with pytest.raises(ValueError, match="^Update: the field more is unknown; expected role, temperature, "):
        decoded(messages.Update, plain | {"more": 1})
    with pytest.raises(ValueError, match="^Limits: the field loss is missing; expected grad_norm, loss$"):
        decoded(messages.Update, plain | {"limits": {"grad_norm": 1.0}})


def test_a_call_has_the_name_of_its_class() -> None:
    assert [kind.method() for kind in (Setup, messages.LoadHeads, messages.IsSaved)] == [
        "setup",
        "load_heads",
        "is_saved",
    ]
    assert UPDATE.label == "update actor"
    assert messages.Faults("folder").label == "faults"


def test_every_call_of_the_roles_has_a_method_of_the_worker() -> None:
    kinds = {each for each in vars(messages).values() if isinstance(each, type) and issubclass(each, Message)}
    bases = {Message, messages.OfRole, messages.Pass}
    assert Worker().handlers().keys() == kinds - bases | {Setup}
