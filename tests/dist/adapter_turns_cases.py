"""What the ranks of test_adapter_turns.py run: two roles with adapters on one base, and each of them alone."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from late_copies import late_copies
from parity_cases import make_step
from torch import Tensor

from megarl.algo.loss import ActorLoss
from megarl.data.packing import plan
from megarl.mcore.models.model import unwrap
from megarl.mcore.setup import destroy_groups
from megarl.mcore.training.optimizer import OptimSettings
from megarl.roles.worker import Worker
from megarl.weights.hf.adapter import adapter_tensors

LOSS = ActorLoss("reinforce")
OPTIM = asdict(OptimSettings("adamw", lr=0.05, eps=1e-3))
RUNS: dict[str, dict[str, Any]] = {
    "first": {"rank": 4, "alpha": 8.0, "targets": ["all-linear"], "seed": 1},
    "second": {"rank": 2, "alpha": 6.0, "targets": ["q_proj", "up_proj", "down_proj"], "seed": 2},
}
NUM_STEPS = 3


class Rank:
    """A worker with the calls of a driver, on a mini-batch of its own for each run."""

    def __init__(self, folder: str, layout: dict[str, Any], engine: dict[str, Any]) -> None:
        self.worker, self.folder, self.engine = Worker(), folder, engine
        self.worker.setup({"layout": layout, "device": "cpu", "seed": 0, "timeout_s": 60.0}, {})

    def load(self, name: str, *, base: str | None = None, lora: dict[str, Any] | None, trains: bool = True) -> Any:
        arguments = {"role": name, "folder": self.folder, "kind": "actor", "dtype": "float32", "engine": self.engine}
        arguments |= {
            "optim": OPTIM if trains else None,
            "lora": lora,
            "plugins": [],
            "reads_weights": True,
            "router_replay": False,
        }
        return self.worker.load({**arguments, "base": base}, {})[0]

    def update(self, name: str, step: int) -> dict[str, Any]:
        arguments = {"role": name, "temperature": 1.0, "loss": asdict(LOSS), "reference": None, "limits": None}
        arguments |= {"shares_prefixes": False}
        payload, num_tokens = self._payload(step + 100 * (name != "first"))
        arguments |= {"num_tokens": num_tokens, "names": list(LOSS.outputs), "notes": []}
        return self.worker.update(arguments, payload)[0]

    def columns(self, name: str) -> dict[str, Tensor]:
        arguments = {"role": name, "temperature": 1.0, "names": ["log_probs"], "reference": None}
        arguments |= {"shares_prefixes": False}
        return self.worker.columns(arguments, self._payload(0)[0])[1]

    def adapters(self, name: str) -> dict[str, Tensor]:
        with self.worker.readable(name) as role:
            return {n: tensor.clone() for n, tensor in adapter_tensors(role.model, role.hf)}

    def base(self, name: str) -> list[Tensor]:
        """The parameters of a role without those of its adapters."""
        return [param for chunk in self.worker.roles[name].model for param in unwrap(chunk).parameters()]

    def _payload(self, seed: int) -> tuple[dict[str, Tensor], int]:
        """This replica's share of a mini-batch with advantages drawn from `seed`."""
        batch = make_step(45)
        draws = torch.randn(batch.num_tokens, generator=torch.Generator().manual_seed(seed))
        batch = batch.with_columns(advantages=draws, old_log_probs=torch.zeros(batch.num_tokens))
        info = self.worker.rank_info
        part = plan(batch.lengths.tolist(), info.num_replicas, max_tokens=24)[info.replica]
        own = batch.keep_columns(*LOSS.columns).select(part.indices)
        frame = {"tokens": own.tokens.int(), "lengths": own.lengths, "rows": own.rows}
        sizes = torch.tensor(part.micro_sizes, dtype=torch.int64)
        return {**frame, "micro_sizes": sizes, **dict(own.columns)}, batch.num_tokens


def turns(folder: str, layout: dict[str, Any], engine: dict[str, Any], out: str) -> dict[str, Any]:
    """Both runs on one base, in turns; then each of them alone, and what the base says by itself."""
    found: dict[str, Any] = {}
    rank = Rank(folder, layout, engine)
    rank.load("first", lora=RUNS["first"])
    rank.load("second", base="first", lora=RUNS["second"])
    rank.load("base", base="first", lora=None, trains=False)
    found["held once"] = all(a is b for a, b in zip(*(rank.base(name) for name in RUNS), strict=True))
    found["base before"] = rank.columns("base")
    together = {name: [] for name in RUNS}
    for step in range(NUM_STEPS):
        for name in RUNS:
            together[name].append(rank.update(name, step))
        rank.worker.save({"role": "second", "folder": f"{out}/second{step}", "in_background": False}, {})
    found["refused"] = refusals(rank)  # after which everybody goes on
    found["together"] = {name: (together[name], rank.adapters(name), rank.columns(name)) for name in RUNS}
    found["base after"] = rank.columns("base")
    found["offloaded"] = [buffer.is_offloaded for name in RUNS for buffer in rank.worker.roles[name].buffers]
    # What was saved in the turns is loaded into a new role beside them, which then goes on as the other one does.
    rank.load("third", base="second", lora=RUNS["second"] | {"seed": 5})
    rank.worker.restore({"role": "third", "folder": f"{out}/second{NUM_STEPS - 1}"}, {})
    found["restored"] = rank.adapters("third")
    found["again"] = [(rank.update(name, NUM_STEPS), rank.adapters(name)) for name in ("second", "third")]
    destroy_groups()
    found["alone"] = {}
    for name, lora in RUNS.items():
        rank = Rank(folder, layout, engine)
        rank.load(name, lora=lora)
        stats = [rank.update(name, step) for step in range(NUM_STEPS)]
        found["alone"][name] = stats, rank.adapters(name), rank.columns(name)
        destroy_groups()
    return found


def refusals(rank: Rank) -> dict[str, str]:
    """The sentences about bases that cannot be shared."""
    found = {}
    for what, change in (
        ("folder", {"folder": str(Path(rank.folder).parent)}),
        ("kind", {"kind": "critic"}),
        ("no adapters", {"lora": None}),
        ("optimizer", {"optim": OPTIM | {"name": "muon"}}),  # known only when its adapters are in the base
    ):
        arguments = {"role": "x", "folder": rank.folder, "kind": "actor", "dtype": "float32", "engine": {}}
        arguments |= {
            "optim": OPTIM,
            "lora": RUNS["first"],
            "plugins": [],
            "reads_weights": True,
            "router_replay": False,
            "base": "first",
        }
        try:
            rank.worker.load({**arguments, **change}, {})
        except ValueError as error:
            found[what] = str(error)
    try:
        with rank.worker.onloaded("first", "second", writes=False):
            pass
    except ValueError as error:
        found["both"] = str(error)
    return found


def all_turns(folder: str, out: str, cases: dict[str, tuple[str, dict[str, Any], dict[str, Any]]]) -> dict[str, Any]:
    """`folder`: has a model for each family.  What is onloaded comes as late as it may."""
    with late_copies():
        return {
            name: turns(f"{folder}/{family}", layout, engine, f"{out}/{name}")
            for name, (family, layout, engine) in cases.items()
        }
