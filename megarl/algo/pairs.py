"""The loss of pairs of answers, as a rank computes it: DPO of a policy's log-probs, Bradley-Terry of a model's scores.

    loss = sum_t weight_t L_pair(t)

A pair is one sample, with the rows of both answers, so both are in one micro-batch.  Every token that counts has the
loss of its pair; the weights of `seq-mean-token-mean` make the mean over pairs of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from megarl.algo.losses.pairs import pair_loss
from megarl.algo.segments import clean, count_segments, segment_count, segment_sum
from megarl.algo.tally import Tally
from megarl.samples.batch import SIGN, Batch, LossOutput


@dataclass(frozen=True)
class PairLoss:
    """Example: PairLoss("ipo", beta=0.1)(batch, {"log_probs": l}), or PairLoss(beta=1.0, output="values")."""

    kind: str = "sigmoid"  # one of PAIR_LOSSES
    beta: float = 0.1
    label_smoothing: float = 0.0
    output: str = "log_probs"  # or values
    per_sequence: ClassVar[bool] = True

    @property
    def columns(self) -> tuple[str, ...]:
        """The batch columns that a call needs, those of a Batch of data/pairs.py with `weight`."""
        return ("weight", "response_mask", SIGN, "ref_log_probs" if self.output == "log_probs" else "margin")

    @property
    def outputs(self) -> tuple[str, ...]:
        """The model's columns that a call needs."""
        return (self.output,)

    def __call__(self, batch: Batch, outputs: dict[str, Tensor]) -> LossOutput:
        """The loss of one micro-batch and its statistics.

        r of an answer is beta sum_t (l_t - l_ref_t), for ipo the mean; of a model's score the score itself.

        Args: batch: the columns of `self.columns`, [T]; outputs: that of `self.outputs`, [T].
        Returns: as of ActorLoss.
        """
        mask = batch.columns["response_mask"] != 0
        given = {name: batch.columns[name] for name in self.columns if name != "response_mask"} | {
            self.output: outputs[self.output]
        }
        col = {name: clean(column, mask) for name, column in given.items()}
        ids = batch.segment_ids
        num_pairs = count_segments(ids)
        tally = Tally(col["weight"], mask, ids)
        for name, column in given.items():
            tally.watch(name, column)
        # float64: the sums are of many tokens, and their difference is small.
        gain = col[self.output].double() - (col["ref_log_probs"].double() if "ref_log_probs" in col else 0)

        def of_answers(sign: int) -> Tensor:
            """[S] the sum, or for ipo the mean, over one answer of each pair."""
            own = mask & (col[SIGN] * sign > 0)
            total = segment_sum(clean(gain, own), ids, num_pairs)
            return total / segment_count(own, ids, num_pairs).clamp(min=1) if self.kind == "ipo" else total

        chosen, rejected = of_answers(1), of_answers(-1)
        gap = chosen - rejected
        if "margin" in col:
            gap = gap - segment_sum(col["margin"], ids, num_pairs)
        loss = pair_loss(gap, self.kind, beta=self.beta, label_smoothing=self.label_smoothing)[ids]
        tally.watch("loss of a pair", loss)
        statistics = {
            "loss": loss,
            "accuracy": ((chosen - rejected).sign() + 1)[ids] / 2,  # a tie is half right
            "chosen": (self.beta * chosen)[ids],
            "rejected": (self.beta * rejected)[ids],
            "margin": (self.beta * (chosen - rejected))[ids],
        }
        for name, column in statistics.items():
            tally.mean(f"pairs/{name}", column)
        return tally.output((col["weight"] * clean(loss, mask)).sum().to(col[self.output].dtype))
