"""Two runs' adapters on one base, trained in turns, against two runs that have a base each."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from late_copies import late_copies
from parity_cases import make_step
from spawn import Ranks
from tiny_models import write_model
from torch import Tensor

from megarl.algo.loss import ActorLoss
from megarl.arch.layout import Layout
from megarl.data.packing import plan
from megarl.group.message import Setup
from megarl.mcore.models.model import unwrap
from megarl.mcore.setup import destroy_groups
from megarl.mcore.training.optimizer import OptimSettings
from megarl.roles.messages import Columns, Load, Restore, Save, Update
from megarl.roles.settings import LoadSettings
from megarl.roles.worker import Worker
from megarl.weights.hf.adapter import adapter_tensors

pytestmark = [pytest.mark.full, pytest.mark.dist]

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
        self.worker.setup(Setup(Layout(**layout), "cpu", 0, 60.0), {})

    def load(self, name: str, *, folder: str = "", kind: Any = "actor", **more: Any) -> Any:
        settings = LoadSettings(**{"engine": self.engine, "optim": OPTIM, **more})
        return self.worker.load(Load(name, kind, folder or self.folder, settings), {})[0]

    def update(self, name: str, step: int) -> dict[str, Any]:
        payload, num_tokens = self._payload(step + 100 * (name != "first"))
        message = Update(name, 1.0, False, None, LOSS, num_tokens=num_tokens, limits=None, notes=())
        return self.worker.update(message, payload)[0]

    def columns(self, name: str) -> dict[str, Tensor]:
        message = Columns(name, 1.0, False, None, ("log_probs",), top_k=0, vocab_size=None)
        return self.worker.columns(message, self._payload(0)[0])[1]

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
    Path(out).mkdir(parents=True, exist_ok=True)
    rank = Rank(folder, layout, engine)
    rank.load("first", lora=RUNS["first"])
    rank.load("second", base="first", lora=RUNS["second"])
    rank.load("base", base="first", lora=None, optim=None)
    found["held once"] = all(a is b for a, b in zip(*(rank.base(name) for name in RUNS), strict=True))
    found["base before"] = rank.columns("base")
    together = {name: [] for name in RUNS}
    for step in range(NUM_STEPS):
        for name in RUNS:
            together[name].append(rank.update(name, step))
        rank.worker.save(Save("second", f"{out}/second{step}", in_background=False), {})
    found["refused"] = refusals(rank)  # after which everybody goes on
    found["together"] = {name: (together[name], rank.adapters(name), rank.columns(name)) for name in RUNS}
    found["base after"] = rank.columns("base")
    found["offloaded"] = [buffer.is_offloaded for name in RUNS for buffer in rank.worker.roles[name].buffers]
    # What was saved in the turns is loaded into a new role beside them, which then goes on as the other one does.
    rank.load("third", base="second", lora=RUNS["second"] | {"seed": 5})
    rank.worker.restore(Restore("third", f"{out}/second{NUM_STEPS - 1}"), {})
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


def refusals(rank: Rank) -> list[str]:
    """The sentences about bases that cannot be shared, the last one about both runs at once."""
    found = []
    for change in (
        {"folder": str(Path(rank.folder).parent)},
        {"kind": "critic"},
        {"lora": None},
        {"optim": OPTIM | {"name": "muon"}},  # known only when its adapters are in the base
    ):
        with pytest.raises(ValueError) as caught:
            rank.load("x", base="first", **{"lora": RUNS["first"], **change})
        found.append(str(caught.value))
    with pytest.raises(ValueError) as caught, rank.worker.onloaded("first", "second", writes=False):
        pass
    return [*found, str(caught.value)]


def all_turns(folder: str, out: str, cases: dict[str, tuple[str, dict[str, Any], dict[str, Any]]]) -> dict[str, Any]:
    """`folder`: has a model for each family.  What is onloaded comes as late as it may."""
    with late_copies():
        return {
            name: turns(f"{folder}/{family}", layout, engine, f"{out}/{name}")
            for name, (family, layout, engine) in cases.items()
        }


OFFLOAD = {"param_offload": True, "optimizer_offload": True}
SP = {"tp": 2, "sequence_parallel": True}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "ep2": ("qwen3_moe", {"ep": 2}, {}),
    "tp2+sp offloaded": ("qwen3_moe", SP, OFFLOAD),
    "dp2 sharded overlapped": ("qwen3_moe", {"use_distributed_optimizer": True}, {"overlap_grad_reduce": True}),
    "pp2 recomputed": (
        "qwen3_moe",
        {"pp": 2},
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    ),
    "latent tp2+sp ep2": ("deepseek_v3_plain", {**SP, "ep": 2, "etp": 1}, {}),
}


@pytest.fixture(scope="module")
def found(two_ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    where = tmp_path_factory.mktemp("turns")
    for family in {family for family, *_ in CASES.values()}:
        write_model(where / family, family, tied=False)
    return two_ranks.run(all_turns, str(where), str(where / "out"), CASES, timeout_s=500)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("case", CASES)
def test_runs_in_turns_equal_separate_runs(found: list[dict[str, Any]], case: str, run: str) -> None:
    """The same operations in the same order: not one bit differs."""
    for rank in found:
        stats, adapters, columns = rank[case]["together"][run]
        own_stats, own, own_columns = rank[case]["alone"][run]
        assert stats == own_stats and len({step["grad_norm"] for step in stats}) == len(stats)
        assert sorted(adapters) == sorted(own)
        assert all(torch.equal(adapters[name], tensor) for name, tensor in own.items())
        assert columns.keys() == own_columns.keys()
        assert all(torch.equal(columns[name], column) for name, column in own_columns.items())


@pytest.mark.parametrize("case", CASES)
def test_the_base_stays_what_it_was_and_is_held_once(found: list[dict[str, Any]], case: str) -> None:
    for rank in found:
        before, after = rank[case]["base before"], rank[case]["base after"]
        assert all(torch.equal(after[name], column) for name, column in before.items())
        assert rank[case]["held once"]
    reporter = next(rank[case] for rank in found if rank[case]["base before"])
    base = reporter["base before"]["log_probs"]
    for run in RUNS:
        assert (reporter["together"][run][2]["log_probs"] - base).abs().max() > 0.01


@pytest.mark.parametrize("case", CASES)
def test_a_run_is_saved_and_restored_beside_others(found: list[dict[str, Any]], case: str) -> None:
    for rank in found:
        saved = rank[case]["together"]["second"][1]
        assert all(torch.equal(rank[case]["restored"][name], tensor) for name, tensor in saved.items())
        (stats, own), (other_stats, other) = rank[case]["again"]
        assert stats == other_stats, "the gradient, and of the optimizer the learning rate"
        assert all(torch.equal(other[name], tensor) for name, tensor in own.items()), "and its moments"
        assert any(not torch.equal(saved[name], tensor) for name, tensor in own.items())


def test_every_role_goes_where_its_options_say(found: list[dict[str, Any]]) -> None:
    """Of each run: the shared base, its adapters, their gradients, the moments."""
    for rank in found:
        assert rank["tp2+sp offloaded"]["offloaded"] == [True] * 8
        assert rank["ep2"]["offloaded"] == [False] * 8


def test_bases_that_cannot_be_shared_are_refused(found: list[dict[str, Any]]) -> None:
    """The runs went on from there, so the adapters that had no optimizer have left the base."""
    for said, words in zip(
        found[0]["ep2"]["refused"],
        (
            "base=first: that role has the folder ",
            "base=first: that role has a model of kind actor, not critic",
            "base=first: without adapters the shared weights would be trained; expected lora",
            "optim.name=muon: expected use_distributed_optimizer=false and no lora",
            "role second has the same base as first, which is in use by one of them at a time",
        ),
        strict=True,
    ):
        assert said.startswith(words)
