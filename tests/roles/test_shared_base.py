"""Which roles can share the base of another one: what is said before anything of it is touched."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megarl.mcore.training import execution
from megarl.mcore.training.execution import ExecutionOptions
from megarl.roles.role import Role, build_on
from megarl.roles.worker import Worker

LORA = {"rank": 2, "alpha": 4.0, "targets": ["all-linear"], "seed": 0}
SAME = {"kind": "actor", "folder": "folder", "dtype": "bfloat16", "engine": {}, "reads_weights": True, "base": "first"}
SAME |= {"lora": LORA, "optim": {}, "plugins": [], "router_replay": False, "role": "second"}


def owner(engine: ExecutionOptions) -> Role:
    """A frozen role in bfloat16."""
    chunks: Any = [SimpleNamespace(config=SimpleNamespace(params_dtype=torch.bfloat16))]
    nothing: Any = None
    return Role("actor", chunks, {}, "folder", *[nothing] * 4, engine=engine, chunks=chunks)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"dtype": "float32"}, "that role has dtype bfloat16, not float32; expected the same"),
        (
            {"engine": {"transformer_impl": "auto", "param_offload": False}},
            "that role has param_offload True, not False; expected the same",
        ),
        ({"reads_weights": False}, "its weights are shared, and no restore brings them; expected reads_weights=True"),
    ],
)
def test_what_a_shared_base_cannot_be_otherwise_is_refused(change: dict[str, Any], sentence: str) -> None:
    local = ExecutionOptions(transformer_impl="local", param_offload=True)
    with pytest.raises(ValueError) as caught:
        build_on(owner(local), SAME | change, layout=None)  # type: ignore[arg-type]
    assert str(caught.value) == f"base=first: {sentence}"


def test_a_frozen_role_with_layers_that_take_no_adapters_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution, "has_transformer_engine", lambda: True)
    with pytest.raises(ValueError) as caught:
        build_on(owner(ExecutionOptions()), SAME, layout=None)  # type: ignore[arg-type]
    assert str(caught.value) == (
        "base=first: that role has Transformer Engine's layers, which take no adapters; expected one that was loaded "
        "with transformer_impl=local"
    )


def test_a_base_that_is_not_loaded_is_refused_with_the_roles_that_are() -> None:
    worker = Worker()
    with pytest.raises(ValueError, match=r"^base=first: there is no such role; expected one of none$"):
        worker.load(SAME, {})
    worker.roles["actor"] = owner(ExecutionOptions())
    with pytest.raises(ValueError, match=r"^base=first: there is no such role; expected one of actor$"):
        worker.load(SAME, {})
