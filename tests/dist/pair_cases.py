"""What test_pairs_dist.py runs: a step on pairs under a layout, and the same written out for transformers' model."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from loss_cases import CPU, Models, Noting
from torch import Tensor
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from megarl.algo.pairs import PairLoss
from megarl.algo.step_columns import step_columns
from megarl.arch.layout import Layout
from megarl.data.packing import plan
from megarl.data.pairs import to_be_scored
from megarl.mcore.setup import destroy_groups, make_groups
from megarl.mcore.training.packed_rows import micro_batches
from megarl.mcore.training.step import backward
from megarl.samples.batch import SIGN, Batch

MODE = "seq-mean-token-mean"
LOSSES = {
    "dpo": PairLoss(beta=0.3),
    "ipo": PairLoss("ipo", beta=0.4),
    "ipo reference-free": PairLoss("ipo", beta=0.4),
    "reference-free": PairLoss(beta=0.3),
    "rm": PairLoss(beta=1.0, output="values"),
    "smoothed": PairLoss(beta=0.3, label_smoothing=0.2),
}


def make_pairs(vocab_size: int, num_pairs: int = 7) -> Batch:
    """Pairs of answers of unequal lengths to prompts that they share, with margins; no token is padding."""
    g = torch.Generator().manual_seed(5)

    def draw(most: int) -> list[int]:
        return torch.randint(1, vocab_size, (int(torch.randint(1, most, (1,), generator=g)),), generator=g).tolist()

    rows, masks = list[list[int]](), list[list[float]]()
    for _ in range(num_pairs):
        prompt = draw(8)
        for answer in (draw(9), draw(6)):
            rows.append(prompt + answer)
            masks.append([0.0] * len(prompt) + [1.0] * len(answer))
    lengths = torch.tensor([len(row) for row in rows])
    signs = torch.tensor([1.0, -1.0] * num_pairs)
    columns = {"response_mask": torch.tensor(sum(masks, [])), SIGN: torch.repeat_interleave(signs, lengths)}
    batch = Batch(torch.tensor(sum(rows, [])), lengths, columns, rows=torch.full((num_pairs,), 2))
    margin = torch.randn(num_pairs, generator=g)
    return batch.with_per_sequence(group=torch.arange(num_pairs), margin=margin)


@torch.no_grad()
def with_reference(batch: Batch, folder: str) -> Batch:
    """The pairs with the log-probs of transformers' model of the folder."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    return batch.with_columns(ref_log_probs=torch.cat([log_probs_of(model, row) for row in rows_of(batch)]))


def rows_of(batch: Batch) -> list[Tensor]:
    return list(batch.tokens.split(batch.lengths.tolist()))


def log_probs_of(model: Any, row: Tensor) -> Tensor:
    """[L] of each token, 0 for the first one."""
    found = model(row[None]).logits[0, :-1].log_softmax(-1).gather(1, row[1:, None])[:, 0]
    return torch.cat([found.new_zeros(1), found])


def written_out(name: str, batch: Batch, folder: str) -> tuple[float, dict[str, Tensor]]:
    """The loss of a step and its gradient: pair by pair, by transformers and the formulas of the papers."""
    kind = AutoModelForSequenceClassification if name == "rm" else AutoModelForCausalLM
    more = {"num_labels": 1} if name == "rm" else {}
    model = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager", **more).eval()
    if name == "rm":  # as fill_value_head
        with torch.no_grad():
            head = model.score.weight
            head.copy_(torch.linspace(-0.5, 0.5, head.numel()).view_as(head))
    rows, lengths = rows_of(batch), batch.lengths.tolist()
    masks = batch.columns["response_mask"].split(lengths)
    references = batch.columns["ref_log_probs"].split(lengths)
    losses = []
    for pair in range(batch.num_sequences):
        sides = (2 * pair, 2 * pair + 1)
        if name == "rm":
            chosen, rejected = (model.score(model.model(rows[at][None]).last_hidden_state[0, -1])[0] for at in sides)
            losses.append(-logsigmoid(chosen - rejected - batch.per_sequence["margin"][pair]))
            continue
        is_free = name.endswith("reference-free")
        gains = [log_probs_of(model, rows[at]) - (0.0 if is_free else references[at]) for at in sides]
        sums = [(gain * masks[at]).sum() for gain, at in zip(gains, sides, strict=True)]
        if name.startswith("ipo"):
            means = [total / masks[at].sum() for total, at in zip(sums, sides, strict=True)]
            losses.append((means[0] - means[1] - 1 / (2 * 0.4)) ** 2)
        else:
            h = 0.3 * (sums[0] - sums[1])
            e = 0.2 if name == "smoothed" else 0.0
            losses.append(-(1 - e) * logsigmoid(h) - e * logsigmoid(-h))
    loss = torch.stack(losses).mean()
    loss.backward()
    return loss.item(), {n: param.grad for n, param in model.named_parameters() if param.grad is not None}


def run_pairs(
    folders: Mapping[str, str], layout: Layout, batch: Batch, names: Sequence[str], num_micros: int
) -> dict[str, dict[str, Any]]:
    """The loss of this rank's share of a step, and on rank 0 the whole gradient, for each of LOSSES that is named."""
    rank_info = make_groups(layout)
    try:
        models = Models(dict(folders), layout)
        return {name: _run(models, rank_info, name, batch, num_micros) for name in names}
    finally:
        destroy_groups()


def _run(models: Models, rank_info: Any, name: str, batch: Batch, num_micros: int) -> dict[str, Any]:
    loss, model = LOSSES[name], "critic" if name == "rm" else "actor"
    if name == "rm":
        batch = to_be_scored(batch)
    elif name.endswith("reference-free"):
        batch = batch.with_columns(ref_log_probs=torch.zeros(batch.num_tokens))
    step = step_columns(batch, loss=loss, agg_mode=MODE)
    replicas = rank_info.num_replicas
    most = -(-step.num_sequences // (num_micros * replicas))
    part = plan(step.sample_lengths.tolist(), replicas, max_sequences=most)[rank_info.replica]
    micros = micro_batches(step.select(part.indices).keep_columns(*loss.columns), part.micro_sizes)
    noting, outputs = Noting(loss), models.outputs(loss.outputs)  # type: ignore[arg-type]
    outputs = type(outputs)(outputs.layout, outputs.vocab_size, 1.0, outputs.names)
    found = backward(models(model), micros, outputs, noting, num_tokens=step.num_tokens, device=CPU)
    whole = models.gradients(model)
    return {
        "value": noting.value if rank_info.is_reporter else 0.0,
        "stats": found.stats if rank_info.is_reporter else {},
        "gradient": whole if dist.get_rank() == 0 else {},
    }
