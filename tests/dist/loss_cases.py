"""What test_loss_splits.py runs: which settings meet which split, and the driver's and Megatron's part of a step."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, product
from typing import Any

import torch
import torch.distributed as dist
from chunks import fill_value_head, gradients
from torch import Tensor

from megarl.algo import (
    AGG_MODES,
    KL_ESTIMATORS,
    POLICY_LOSSES,
    ActorLoss,
    Correction,
    CriticLoss,
    correct,
    estimate,
    register_policy_loss,
    step_columns,
)
from megarl.arch.hf_config import read_hf_config
from megarl.arch.layout import Layout
from megarl.data.packing import plan
from megarl.mcore.models.model import Model, build_model
from megarl.mcore.setup import RankInfo, destroy_groups, make_groups
from megarl.mcore.training.optimizer import wrap_for_training
from megarl.mcore.training.packed_rows import micro_batches
from megarl.mcore.training.step import Columns, Outputs, backward, forward_only
from megarl.samples.batch import Batch, LossOutput, Stats
from megarl.weights.hf.load import load_hf

NORMALIZED = "token"
CORRECTIONS = {
    "off": Correction(),
    "token": Correction(level="token", truncate=1.2),
    "icepop": Correction(level="token", truncate=None, mask_low=0.7, mask_high=1.4),
    "sequence": Correction(level="sequence", truncate=2.0, reject_by="k3", reject_high=0.15),
    "geometric": Correction(
        level="geometric", truncate=1.1, reject_by="ratio", reject_level="sequence", reject_low=0.4, reject_high=3.0
    ),
    "bypass": Correction(bypass=True),
}

Row = dict[str, Any]  # factor -> the name of its value

DOCUMENTED, VALUE = "documented", "value"  # a user's loss of the documented form; the critic's


@dataclass(frozen=True)
class Split:
    """How one optimizer step is cut: over how many ranks, laid out how, in how many micro-batches on each."""

    ranks: int
    micros: int
    layout: Layout = Layout()


@dataclass(frozen=True)
class Case:
    """One optimizer step: what is computed, of which data, cut how."""

    loss: str
    mode: str
    split: str
    kl: str = "off"  # a kl_loss_type, or "importance"
    correction: str = "off"  # a name of CORRECTIONS
    entropy: str = "0"  # entropy_coeff
    data: str = "mild"  # a name of what make_data returns


def _unique(table: Mapping[str, object]) -> tuple[str, ...]:
    """Names without the aliases, which stand for the same function."""
    seen: dict[object, str] = {}
    for name, function in table.items():
        seen.setdefault(function, name)
    return tuple(seen.values())


SP: dict[str, Any] = {"tp": 2, "sequence_parallel": True}
SPLITS = {  # one split at a time, then several at once
    "micro2": Split(1, 2),
    "micro4": Split(1, 4),
    "dp2": Split(2, 1),
    "dp4": Split(4, 1),
    "cp2": Split(2, 1, Layout(cp=2)),
    "tp2": Split(2, 1, Layout(tp=2)),
    "tp2+sp": Split(2, 2, Layout(**SP)),
    "pp2": Split(2, 4, Layout(pp=2)),
    "dp2 cp2": Split(4, 2, Layout(cp=2)),
    "dp2 pp2": Split(4, 4, Layout(pp=2)),
    "tp2+sp cp2": Split(4, 2, Layout(**SP, cp=2)),
    "tp2 pp2": Split(4, 1, Layout(tp=2, pp=2)),
    "dp2 tp2": Split(4, 2, Layout(tp=2)),
    "cp2 pp2": Split(4, 2, Layout(cp=2, pp=2)),
}
ONE = "one"  # one rank, one micro-batch: what every split is compared with
ALL_SPLITS = {ONE: Split(1, 1)} | SPLITS

LOSSES = (*_unique(POLICY_LOSSES), DOCUMENTED, VALUE)
MODES = _unique(AGG_MODES)
KLS = ("off", "importance", *(f"{name}{plus}" for name in (*_unique(KL_ESTIMATORS), "full") for plus in ("", "+")))
FACTORS: dict[str, Sequence[str]] = {
    "loss": LOSSES,
    "mode": MODES,
    "kl": KLS,
    "correction": tuple(CORRECTIONS),
    "entropy": ("0", "0.05"),
    "data": ("mild", "hard", "scored"),
}
OF_ACTORS = ("kl", "correction", "entropy")  # the first value is the one that leaves it out


def has_meaning(row: Row) -> bool:
    """A critic has weights, and nothing of what else an actor's loss has."""
    return row.get("loss") != VALUE or all(row.get(name) in (None, FACTORS[name][0]) for name in OF_ACTORS)


def cover() -> list[Case]:
    """Few cases in which every pair of values of two factors occurs that has a meaning, the split being one factor.

    Greedy: a case begins with a pair that has not occurred and takes, factor after factor, the value that brings most
    new pairs with what the case has; of equals the one that was used least.
    """
    factors = {**FACTORS, "split": tuple(SPLITS)}
    missing = dict.fromkeys(pair for pair in pairs(factors) if has_meaning(dict(pair)))
    used, cases = Counter[tuple[str, str]](), list[Case]()
    while missing:
        row: Row = dict(next(iter(missing)))
        for name in sorted(set(factors) - set(row), key=lambda name: (-len(factors[name]), name)):

            def worth(value: str, name: str = name, row: Row = row) -> tuple[int, int]:
                return sum(frozenset([(name, value), other]) in missing for other in row.items()), -used[name, value]

            row[name] = max((value for value in factors[name] if has_meaning({**row, name: value})), key=worth)
        used.update(row.items())
        for pair in combinations(row.items(), 2):
            missing.pop(frozenset(pair), None)
        cases.append(Case(**row))
    return cases


def pairs(factors: Mapping[str, Sequence[str]]) -> Iterator[frozenset[tuple[str, str]]]:
    """Every pair of values of two different factors."""
    for a, b in combinations(factors, 2):
        yield from (frozenset([(a, x), (b, y)]) for x, y in product(factors[a], factors[b]))


CPU = torch.device("cpu")
TEMPERATURE = 0.8

# Groups of 2, 1, 3, 4 and 3: the first has nothing to train, a sequence whose tokens are all masked and one of a single
# token, which nothing predicts; the second is a group of one; two sequences have one trainable token.
LENGTHS = [5, 1, 9, 4, 2, 12, 3, 7, 10, 6, 2, 8, 11]
ROWS = {5: [7, 5], 8: [4, 6], 12: [5, 6]}  # the samples of several rows: 16 rows of 13 samples
GROUPS = [6, 6, 2, 4, 4, 4, 0, 0, 0, 0, 9, 9, 9]
ALONE = 2
UNTRAINED = (0, 1)
# Where hard data has large ratios: l - l_old of the k-th trainable tokens, and l - l_ref of others.
RATIOS = {3: 45.0, 4: 45.0, 11: 30.0, 17: 21.0, 20: 3.0, 26: 2.0, 31: 45.0, 34: 25.0}
REFERENCE_GAPS = {5: 45.0, 18: 30.0}

ARGS = {
    "dro": {"beta": 0.5},
    "clip_cov": {"clip_cov_ratio": 0.3, "clip_cov_lb": -0.2, "clip_cov_ub": 20.0},
    "kl_cov": {"kl_cov_ratio": 0.3},
}


def documented(old_log_probs, log_probs, advantages, response_mask, loss_agg_mode="token_level", config=None):
    """A user's loss: PPO, written in the documented way on [batch, sequence] tensors."""
    ratio = (log_probs - old_log_probs).clamp(-20, 20).exp()
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2)) * response_mask
    stats = {"share_above": (ratio > 1).float().mean()}
    if loss_agg_mode == "token_level":
        return loss.sum() / response_mask.sum(), stats
    return (loss.sum(1) / response_mask.sum(1)).mean(), stats


def make_tokens(vocab_size: int) -> Batch:
    """The samples of the step."""
    g = torch.Generator().manual_seed(3)
    rows = [ROWS.get(b, [length]) for b, length in enumerate(LENGTHS)]
    tokens = torch.randint(0, vocab_size, (sum(LENGTHS),), generator=g)
    return Batch(tokens, torch.tensor(sum(rows, [])), rows=torch.tensor([len(of_sample) for of_sample in rows]))


def make_data(sequences: Batch, now: Columns) -> dict[str, Batch]:
    """The steps that cases are made of, by name.

    mild: every number near what the models say now, zeros at masked places.  hard: large ratios, NaN at masked places.
    scored: advantages of GRPO.
    """
    mild = make_step(sequences, now)
    scores = torch.randn(len(LENGTHS), generator=torch.Generator().manual_seed(5))
    return {
        "mild": mild,
        "hard": make_step(sequences, now, hard=True, at_masked=float("nan")),
        "scored": estimate(mild.with_per_sequence(score=scores), adv_estimator="grpo")[0],
    }


def make_step(sequences: Batch, now: Columns, *, hard: bool = False, at_masked: float = 0.0) -> Batch:
    """A step whose old columns lie around what the models say now.

    `hard` has large ratios; `at_masked` stands in every column where no token was chosen.
    """
    g = torch.Generator().manual_seed(4)
    n, b = sequences.num_tokens, sequences.segment_ids
    mask = torch.rand(n, generator=g) < 0.7
    mask[sequences.row_starts] = False
    mask[torch.isin(b, torch.tensor(UNTRAINED))] = False
    first_rows = sequences.rows.cumsum(0) - sequences.rows
    mask[sequences.row_starts[first_rows[[4, 10]]] + 1] = True
    noise = {name: torch.randn(n, generator=g) for name in ("advantages", "old", "rollout", "ref", "values", "returns")}
    moved, gap = 0.3 * noise["old"], 0.2 * noise["ref"]
    chosen = mask.nonzero().squeeze(1)
    if hard:
        moved[chosen[list(RATIOS)]] = torch.tensor(list(RATIOS.values()))
        gap[chosen[list(REFERENCE_GAPS)]] = torch.tensor(list(REFERENCE_GAPS.values()))
    old = now["log_probs"] - moved
    columns = {
        "old_log_probs": old,
        "rollout_log_probs": old + 0.3 * noise["rollout"],
        "ref_log_probs": now["ref_log_probs"] - gap,
        "advantages": noise["advantages"],
        "values": now["values"] + 0.5 * noise["values"],
        "returns": now["values"] + noise["returns"],
    }
    columns = {name: torch.where(mask, column, at_masked) for name, column in columns.items()}
    groups = torch.tensor(GROUPS)
    return sequences.with_columns(**columns, response_mask=mask.float()).with_per_sequence(group=groups)


def make_loss(case: Case) -> ActorLoss | CriticLoss:
    if case.loss == VALUE:
        return CriticLoss(0.5)
    kind = "low_var_kl" if case.kl == "importance" else case.kl
    kl = {} if case.kl == "off" else {"use_kl_loss": True, "kl_loss_coef": 0.5, "kl_loss_type": kind}
    return ActorLoss(
        case.loss,
        args=ARGS.get(case.loss, {}),
        entropy_coeff=float(case.entropy),
        kl_importance=case.kl == "importance",
        use_rollout_weight=CORRECTIONS[case.correction].level is not None,
        **kl,
    )


def columns_of(step: Batch, case: Case, loss: ActorLoss | CriticLoss) -> Batch:
    """What the driver makes once of a whole step."""
    how = CORRECTIONS[case.correction]
    return step_columns(
        correct(step, how)[0] if case.correction != "off" else step,
        loss=loss,
        agg_mode=case.mode,
        loss_scale_factor=16.0,
        seed=11,
        normalize=case.correction == NORMALIZED,
        bypass=how.bypass,
    )


@dataclass
class Noting:
    """A loss that adds up what it returned."""

    loss: ActorLoss | CriticLoss
    value: float = 0.0

    def __call__(self, batch: Batch, outputs: Columns) -> LossOutput:
        found = self.loss(batch, outputs)
        self.value += found.loss.item()
        return found


@dataclass
class Models:
    """The models of a layout on this rank, made when they are asked for."""

    folders: dict[str, str]  # actor, reference
    layout: Layout
    made: dict[str, Model] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.hf = read_hf_config(self.folders["actor"])

    def __call__(self, name: str) -> Model:
        if name not in self.made:
            role = "critic" if name == "critic" else "actor"
            folder = self.folders["reference" if name == "reference" else "actor"]
            model = build_model(self.hf, self.layout, role=role)
            load_hf(model, folder, self.hf, role=role)
            if role == "critic":
                fill_value_head(model)
            self.made[name] = model if name == "reference" else wrap_for_training(model, self.layout)
        return self.made[name]

    def outputs(self, names: Sequence[str]) -> Outputs:
        return Outputs(self.layout, self.hf["vocab_size"], TEMPERATURE, tuple(names))

    def gradients(self, name: str) -> dict[str, Tensor]:
        """{HF name: the whole gradient}."""
        return gradients(self(name), self.hf, "critic" if name == "critic" else "actor")


def now(folders: dict[str, str]) -> tuple[Batch, Columns]:
    """The sequences, and what the models say of them, on one rank in one row."""
    make_groups(Layout())
    try:
        models = Models(folders, Layout())
        batch = make_tokens(models.hf["vocab_size"])
        row = micro_batches(batch, [batch.num_sequences])
        wanted = {"log_probs": ("actor", "log_probs"), "ref_log_probs": ("reference", "log_probs")}
        wanted["values"] = ("critic", "values")
        found = {
            column: forward_only(models(model), row, models.outputs((name,)), CPU)[0][name]
            for column, (model, name) in wanted.items()
        }
        return batch, found
    finally:
        destroy_groups()


def run_cases(folders: dict[str, str], cases: Sequence[Case], data: dict[str, Batch]) -> dict[Case, dict[str, Any]]:
    """What each case gives: the loss and statistics of this rank's replica, and on rank 0 the whole gradient.

    The cases are of one split; a gradient is that of the step's loss, summed over everything by Megatron.
    """
    if DOCUMENTED not in POLICY_LOSSES:
        register_policy_loss(DOCUMENTED)(documented)
    (split,) = {case.split for case in cases}
    layout = ALL_SPLITS[split].layout
    rank_info = make_groups(layout)
    try:
        models = Models(folders, layout)
        return {case: _run(models, rank_info, case, data[case.data]) for case in cases}
    finally:
        destroy_groups()


def _run(models: Models, rank_info: RankInfo, case: Case, step: Batch) -> dict[str, Any]:
    loss = make_loss(case)
    packed = columns_of(step, case, loss)
    if not loss.per_sequence:  # else it looks at all of a sample
        packed = packed.by_row()
    rows = ALL_SPLITS[case.split].micros * rank_info.num_replicas
    how = {"max_sequences": -(-packed.num_sequences // rows)}
    part = plan(packed.sample_lengths.tolist(), rank_info.num_replicas, **how)[rank_info.replica]
    micros = micro_batches(packed.select(part.indices).keep_columns(*loss.columns), part.micro_sizes)
    noting, name = Noting(loss), "critic" if case.loss == VALUE else "actor"
    stats: Stats = backward(
        models(name),
        micros,
        models.outputs(loss.outputs),
        noting,
        num_tokens=step.num_tokens,
        device=CPU,
        reference=models("reference") if "full_kl" in loss.outputs else None,
    ).stats
    whole = models.gradients(name)
    return {
        "value": noting.value if rank_info.is_reporter else 0.0,
        "stats": stats if rank_info.is_reporter else {},
        "gradient": whole if dist.get_rank() == 0 else {},
        "num_micros": len(micros),
    }
