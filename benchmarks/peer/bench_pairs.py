"""DPO and reward models here and in TRL: the loss of a step on the same pairs, and its gradient, under each layout.

    python benchmarks/peer/bench_peer.py --make-environment    once: an environment for TRL, as peer.txt says
    python benchmarks/peer/bench_pairs.py                      exit code 1 where a difference is above 1e-5

TRL's `DPOTrainer` (sigmoid, ipo) and `RewardTrainer` compute theirs on one process (trl_pairs.py); here the ranks of
tests/dist/test_pairs_dist.py do, Megatron's forward and backward pass.  Models: a Qwen3 of two layers with random
weights in float32, tied and untied; the reference is another one.  --quick: the tied model on a single rank.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository
sys.path.extend([f"{sys.path[0]}/tests/helpers", f"{sys.path[0]}/tests/dist"])

from pair_cases import LOSSES, make_pairs, rows_of, run_pairs, with_reference
from parity_compare import relative
from spawn import Ranks
from tiny_models import SIZES, write_model

from benchmarks.common.execute import execute
from benchmarks.common.page import Result, arguments, run
from benchmarks.peer.bench_peer import check_pins, trl_python
from megarl.arch.layout import Layout
from megarl.data.examples.tiny import tiny_tokenizer
from megarl.samples.batch import Batch

NAMES = {"dpo": "DPO, sigmoid", "ipo": "DPO, ipo", "rm": "reward model, margins"}  # of LOSSES
CUTS = {  # ranks, layout, micro-batches
    "single rank": (1, Layout(), 1),
    "TP2": (2, Layout(tp=2), 1),
    "PP2": (2, Layout(pp=2), 4),
    "CP2": (2, Layout(cp=2), 2),
}
LIMIT = 1e-5
LEGEND = (
    "of the loss: the difference by TRL's loss. of the gradient: the largest difference of a tensor by its largest "
    "entry or, where that is smaller, by a hundredth of the largest entry of all tensors; the worst tensor."
)
Found = dict[str, tuple[float, dict[str, Any]]]  # name of LOSSES -> loss, and gradient by the name of the tensor


def trl_side(python: Path, folder: Path, models: dict[str, str], batch: Batch) -> tuple[Found, dict[str, str]]:
    """What TRL's trainers compute of the pairs, and its versions."""
    rows = [row.tolist() for row in rows_of(batch)]
    masks = [mask.tolist() for mask in batch.columns["response_mask"].split(batch.lengths.tolist())]
    parts = [
        [[t for t, m in zip(*each, strict=True) if m == of] for each in zip(rows, masks, strict=True)] for of in (0, 1)
    ]
    task = {
        "models": models,
        "tokenizer": str(folder / "tokenizer"),
        "prompts": parts[0][::2],
        "chosen": parts[1][::2],
        "rejected": parts[1][1::2],
        "margins": batch.per_sequence["margin"].tolist(),
        "losses": {name: asdict(LOSSES[name]) for name in NAMES},
        "folder": str(folder),
    }
    tiny_tokenizer().save_pretrained(folder / "tokenizer")
    (folder / "task.json").write_text(json.dumps(task))
    script = str(Path(__file__).with_name("trl_pairs.py"))
    execute([str(python), script, str(folder / "task.json")], folder / "trl.log", {})
    said = json.loads((folder / "losses.json").read_text())
    check_pins(said["versions"])
    return {name: (said[name], load_file(folder / f"{name}.safetensors")) for name in NAMES}, said["versions"]


def our_side(cut: str, models: dict[str, str], batch: Batch) -> Found:
    size, layout, micros = CUTS[cut]
    with Ranks(size) as ranks:
        got = ranks.run(run_pairs, models, layout, batch, list(NAMES), micros, timeout_s=600)
    return {name: (sum(rank[name]["value"] for rank in got), got[0][name]["gradient"]) for name in NAMES}


def differences(ours: tuple[float, dict[str, Any]], theirs: tuple[float, dict[str, Any]]) -> dict[str, float]:
    """Of loss and gradient, as LEGEND says.  Raises ValueError where a side has other tensors."""
    (loss, gradient), (their_loss, their_gradient) = ours, theirs
    if gradient.keys() != their_gradient.keys():
        raise ValueError(f"gradients of other tensors: {sorted(gradient.keys() ^ their_gradient.keys())}")
    scale = max(tensor.abs().max().item() for tensor in their_gradient.values())
    each = [relative(gradient[name].view_as(tensor), tensor, 1e-2 * scale) for name, tensor in their_gradient.items()]
    return {"of the loss": abs(loss - their_loss) / abs(their_loss), "of the gradient": max(each)}


def work(options: argparse.Namespace) -> Result:
    if options.device != "cpu":
        raise ValueError(f"--device {options.device}: the ranks are those of a CPU; expected --device cpu")
    python = trl_python()
    result = Result("pairs", "cpu", {"limit": LIMIT}, notes=[LEGEND], title="DPO and reward models beside TRL")
    for which in ("tied",) if options.quick else ("tied", "untied"):
        with tempfile.TemporaryDirectory(prefix="bench_pairs_") as folder:
            models = {
                name: str(write_model(Path(folder, name), "qwen3", tied=which == "tied", seed=at, num_hidden_layers=2))
                for at, name in enumerate(("actor", "reference"), start=1)
            }
            batch = with_reference(make_pairs(SIZES["vocab_size"]), models["reference"])
            theirs, versions = trl_side(python, Path(folder), models, batch)
            for cut in ("single rank",) if options.quick else CUTS:
                for name, found in our_side(cut, models, batch).items():
                    row = {"model": which, "loss": NAMES[name], "layout": cut, "TRL's value": theirs[name][0]}
                    result.rows.append(row | differences(found, theirs[name]))
    result.configuration["TRL's side"] = ", ".join(f"{name} {version}" for name, version in versions.items())
    result.ratios = {
        f"largest difference {of}": max(row[of] for row in result.rows) for of in ("of the loss", "of the gradient")
    }
    if not all(value < LIMIT for value in result.ratios.values()):
        result.failed = f"a difference is above {LIMIT:g}"
    return result


if __name__ == "__main__":
    raise SystemExit(run(work, arguments(__doc__)))
