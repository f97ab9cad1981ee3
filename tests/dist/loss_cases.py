"""What runs on the ranks of test_loss_splits.py: the driver's part and Megatron's part of one optimizer step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from chunks import fill_value_head, gradients
from loss_cover import ALL_SPLITS, DOCUMENTED, VALUE, Case
from torch import Tensor

from megarl.algo import (
    POLICY_LOSSES,
    ActorLoss,
    Correction,
    CriticLoss,
    correct,
    estimate,
    register_policy_loss,
    step_columns,
)
from megarl.batch import Batch, LossOutput, MicroBatch, Stats
from megarl.data.packing import RankPlan, plan
from megarl.layout import Layout
from megarl.mcore.models.model import Model, build_model, read_hf_config
from megarl.mcore.setup import RankInfo, destroy_groups, make_groups
from megarl.mcore.training.optimizer import wrap_for_training
from megarl.mcore.training.packed_rows import micro_batches
from megarl.mcore.training.step import Columns, Outputs, backward, forward_only
from megarl.weights.hf.load import load_hf

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
    scored: advantages of GRPO.  empty: nothing to train.
    """
    mild = make_step(sequences, now)
    scores = torch.randn(len(LENGTHS), generator=torch.Generator().manual_seed(5))
    return {
        "mild": mild,
        "hard": make_step(sequences, now, hard=True, at_masked=float("nan")),
        "hard with zeros": make_step(sequences, now, hard=True),
        "scored": estimate(mild.with_per_sequence(score=scores), adv_estimator="grpo")[0],
        "empty": mild.with_columns(response_mask=torch.zeros(sequences.num_tokens)),
        "trainable only": mild.select([b for b in range(len(LENGTHS)) if b not in UNTRAINED]),
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


def packed_of(step: Batch, loss: ActorLoss | CriticLoss) -> Batch:
    """What is packed: samples, if the loss looks at all of one, else rows."""
    return step if loss.per_sequence else step.by_row()


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


def micros_of(step: Batch, case: Case, loss: ActorLoss | CriticLoss, part: RankPlan) -> list[MicroBatch]:
    """This replica's share, as the driver sends it."""
    if not case.inside:
        mine = packed_of(columns_of(step, case, loss), loss).select(part.indices)
        return micro_batches(mine.keep_columns(*loss.columns), part.micro_sizes)
    packed = packed_of(step, loss)
    alone = [columns_of(packed.select(members), case, loss) for members in part.micro_batches]
    share = 1.0 if case.mode.startswith("token-sum") else 1.0 / len(alone)  # public code's mean over micro-batches
    weighed = [own.with_columns(weight=share * own.columns["weight"]) for own in alone]
    return [MicroBatch(own.keep_columns(*loss.columns)) for own in weighed]


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


def run_cases(folders: dict[str, str], cases: Sequence[Case], data: dict[str, Batch]) -> list[dict[str, Any]]:
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
        return [_run(models, rank_info, case, data[case.data]) for case in cases]
    finally:
        destroy_groups()


def _run(models: Models, rank_info: RankInfo, case: Case, step: Batch) -> dict[str, Any]:
    loss = make_loss(case)
    rows = ALL_SPLITS[case.split].micros * rank_info.num_replicas
    packed = packed_of(step, loss)
    lengths = packed.sample_lengths.tolist()
    parts = plan(lengths, rank_info.num_replicas, max_sequences=-(-packed.num_sequences // rows))
    micros = micros_of(step, case, loss, parts[rank_info.replica])
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
        "num_dummies": sum(micro.is_dummy for micro in micros),
    }
