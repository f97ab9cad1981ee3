"""An optimizer step over the tokens that could be drawn, under every parallelism and against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lora_compare import per_sequence
from parity_cases import Case, Found, Table, make_step, with_support
from parity_compare import assert_same_gradient, assert_same_stats
from transformers import AutoModelForCausalLM

from megarl.data.examples.tiny import write_tiny_model
from megarl.layout import Layout
from megarl.ragged import COUNTS, gathered
from megarl.sample import SUPPORT

pytestmark = [pytest.mark.slow, pytest.mark.dist]

SHAPE = {"hidden": 32, "layers": 4, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn": 48}
SP: dict[str, Any] = {"tp": 2, "sequence_parallel": True}
LAYOUTS: dict[int, dict[str, Layout]] = {
    2: {
        "tp2": Layout(tp=2),
        "tp2+sp": Layout(**SP),
        "cp2": Layout(cp=2),
        "pp2 vpp2": Layout(pp=2, vpp=2),
        "dp2": Layout(),
    },
    4: {"tp2cp2+sp": Layout(**SP, cp=2)},
}
ROLES = ("actor", "actor with reference")
CASES = [(name, role) for layouts in LAYOUTS.values() for name in layouts for role in ROLES]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "qwen3", seed=1, **SHAPE)


@pytest.fixture(scope="module")
def found(folder: Path) -> Found:
    alone = {f"one/{role}": Case(role, narrowed=True) for role in ROLES}
    small = {f"one split/{role}": Case(role, narrowed=True, max_tokens=14) for role in ROLES}
    tables = [Table(1, str(folder), alone | small | {"one/whole": Case("actor")})]
    for size, layouts in LAYOUTS.items():
        cases = {f"{name}/{role}": Case(role, how, narrowed=True) for name, how in layouts.items() for role in ROLES}
        tables.append(Table(size, str(folder), cases))
    return Found(*tables)


def by_transformers(folder: Path, column: str) -> dict[int, torch.Tensor]:
    """Of each sequence, from whole logits with every excluded token at minus infinity."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    vocab_size = model.config.vocab_size
    batch = with_support(make_step(vocab_size), vocab_size)
    counts = batch.columns[SUPPORT + COUNTS].long()
    starts, ids = gathered(batch.columns[SUPPORT], counts, batch.row_starts, batch.row_ids)
    first, columns = 0, {}
    for number, tokens in enumerate(batch.split(batch.tokens)):
        with torch.no_grad():
            logits = model(tokens[None]).logits[0, :-1].double() / 0.8
        own = torch.zeros(len(tokens))
        for place in range(1, len(tokens)):
            support = ids[starts[first + place] : starts[first + place] + counts[first + place]]
            left = logits[place - 1][support] if len(support) else logits[place - 1]
            log_p = left.log_softmax(-1)
            if column == "entropy":
                own[place] = -(log_p.exp() * log_p).sum()
            else:
                own[place] = logits[place - 1][tokens[place]] - left.logsumexp(-1)
        columns[number] = own
        first += len(tokens)
    return columns


@pytest.mark.parametrize("column", ["log_probs", "entropy"])
def test_columns_are_those_of_a_masked_softmax(found: Found, folder: Path, column: str) -> None:
    (rank,) = found["one/actor"]
    got = per_sequence([{"indices": rank["indices"], "column": rank["columns"][column]}], "column")
    whole = found["one/whole"][0]["columns"][column]
    assert (rank["columns"][column] - whole).abs().max() > 0.5, "it matters"
    for number, expected in by_transformers(folder, column).items():
        torch.testing.assert_close(got[number], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("layout", "role"), [*CASES, *(("one split", role) for role in ROLES)])
def test_gradient_and_statistics_do_not_depend_on_layout_or_split(found: Found, layout: str, role: str) -> None:
    expected, got = found[f"one/{role}"], found[f"{layout}/{role}"]
    assert_same_gradient(got[0]["gradient"], expected[0]["gradient"])
    assert_same_stats(got, expected)
