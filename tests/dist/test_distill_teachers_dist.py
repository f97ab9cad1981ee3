"""Two teachers into one student, under every kind of parallelism: the gradient is that of transformers' whole logits.

The teachers have more layers than the student and other hidden sizes, and their states come from layouts of their own.
"""

from collections.abc import Callable
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from divergence_plain import of_probabilities
from rank_answers import Answers
from spawn import Ranks
from teacher_cases import BETA, TEMPERATURE, student_gradients, teacher_columns
from tiny_models import write_model
from transformers import AutoModelForCausalLM

from megarl.algo.distillation import NO_LOG_PROB
from megarl.arch.layout import Layout
from megarl.hf_server.hub_names import hub_tensors
from megarl.mcore.models.lora import LoraSettings
from megarl.samples.batch import Batch, merge_stats
from megarl.weights.hf.load import read_head

pytestmark = pytest.mark.dist

LENGTHS = torch.tensor([9, 3, 12, 7, 5, 8])
NAMES = ("reverse_kl", "forward_kl", "jsd")
SP: dict[str, Any] = {"tp": 2, "sequence_parallel": True}
TEACHERS = {"tp2+sp": Layout(**SP), "cp2": Layout(cp=2), "pp2": Layout(pp=2), "dp2": Layout()}
DENSE = {"tp2": Layout(tp=2), "tp2+sp": Layout(**SP), "pp2": Layout(pp=2), "cp2": Layout(cp=2), "dp2": Layout()}
DEEP = {"tp2+sp cp2": Layout(**SP, cp=2), "tp2 pp2": Layout(tp=2, pp=2)}
TOP, TAIL = 6, 1e-6
SPARSE = {"ep2": Layout(ep=2), "tp2+sp ep2 etp1": Layout(**SP, ep=2, etp=1)}


Case = tuple[str, str, str, bool]  # the student, a layout, a divergence, whether over the likeliest tokens alone
CASES: dict[Case, Layout] = {
    **{("student", how, name, k): DENSE[how] for how in DENSE for name in NAMES for k in (False, True)},
    **{("experts", how, name, False): SPARSE[how] for how in SPARSE for name in NAMES[::2]},
    ("experts", "ep2", "reverse_kl", True): SPARSE["ep2"],
    **{("student", how, "jsd", False): DEEP[how] for how in DEEP},
}
FAST: set[Case] = {
    *(("student", how, "reverse_kl", False) for how in ("tp2+sp", "pp2", "cp2")),
    *(("student", "dp2", "forward_kl", False), ("student", "tp2", "jsd", False), ("student", "tp2+sp", "jsd", True)),
    ("experts", "ep2", "reverse_kl", False),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    shapes: dict[str, Any] = {
        "student": ("qwen3", {"num_hidden_layers": 2, "tied": True, "seed": 1}),
        "experts": ("qwen3_moe", {"num_hidden_layers": 2, "tied": False, "seed": 2, "mlp_only_layers": []}),
        "first": ("qwen3", {"num_hidden_layers": 4, "tied": False, "seed": 3, "hidden_size": 48}),
        "second": ("qwen2", {"num_hidden_layers": 2, "tied": True, "seed": 4, "hidden_size": 16}),
    }
    # The second teacher's vocabulary has more padding, as that of a larger model of the same family.
    shapes["second"][1]["vocab_size"] = 50
    return {name: write_model(root / name, family, **more) for name, (family, more) in shapes.items()}


@pytest.fixture(scope="module")
def batch() -> Batch:
    """Prompts and answers of three teachers: the first, the second, and none."""
    g = torch.Generator().manual_seed(3)
    num = int(LENGTHS.sum())
    frame = Batch(torch.randint(0, 45, (num,), generator=g), LENGTHS)
    mask = (torch.rand(num, generator=g) < 0.7).float()
    mask[frame.row_starts] = 0.0
    teacher = torch.tensor([1, 2, 2, 1, 0, 1])[frame.row_ids]
    columns = {"response_mask": mask, "weight": mask / mask.sum(), "teacher": teacher}
    columns |= {"old_log_probs": torch.zeros(num), "advantages": torch.zeros(num)}
    return frame.with_columns(**columns, distill_weight=torch.tensor([0.0, 1.0, 0.5])[teacher])


@torch.no_grad()
def states_of(folder: Path, batch: Batch) -> torch.Tensor:
    """[N, H]: transformers' last hidden state before each token; 0 before a row's first."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager").eval()
    found = []
    for ids in batch.tokens.split(batch.lengths.tolist()):
        hidden = model.model(ids[None]).last_hidden_state[0]
        found += [torch.zeros_like(hidden[:1]), hidden[:-1]]
    return torch.cat(found)


@pytest.mark.parametrize("layout", TEACHERS)
@pytest.mark.parametrize("name", ["first", "second"])
def test_what_teachers_say_is_what_transformers_says_in_any_layout(
    teachers_states: dict[str, list[dict[str, Any]]], folders: dict[str, Path], batch: Batch, name: str, layout: str
) -> None:
    """Hidden states, and the likeliest of the tokens that the policy knows: the second vocabulary is larger."""
    states = states_of(folders[name], batch)
    model = AutoModelForCausalLM.from_pretrained(folders[name], dtype=torch.float64).eval()
    with torch.no_grad():
        log_q = (model.lm_head(states)[:, :45] / TEMPERATURE).log_softmax(-1)
    expected, seen = batch.with_columns(states=states, log_q=log_q), 0
    for indices, columns in (found for rank in teachers_states[name] for found in rank[layout]):
        mine = expected.select(indices)
        assert (columns["hidden_states"] - mine.columns["states"]).abs().max() < 2e-5
        told = torch.ones(mine.num_tokens, dtype=torch.bool).index_fill(0, mine.row_starts, False)
        top = mine.columns["log_q"].topk(TOP).values[told]
        assert (columns["top_log_probs"][told] - top).abs().max() < 2e-5
        assert (mine.columns["log_q"].gather(1, columns["top_ids"])[told] - top).abs().max() < 2e-5
        seen += len(indices)
    assert seen == len(LENGTHS)


@pytest.fixture(scope="module")
def teachers_states(two_ranks: Ranks, folders: dict[str, Path], batch: Batch) -> dict[str, list[dict[str, Any]]]:
    """What the two teachers say, on each rank, in each layout."""
    how = (batch, TEACHERS, TOP)
    return {n: two_ranks.run(teacher_columns, str(folders[n]), *how, timeout_s=240) for n in ("first", "second")}


@pytest.fixture(scope="module")
def taught(teachers_states: dict[str, Any], batch: Batch) -> Batch:
    """What each sample's own teacher says of it, on tensor- and sequence-parallel ranks."""
    hidden = torch.zeros(batch.num_tokens, 48)
    ids = torch.full((batch.num_tokens, TOP), -1, dtype=torch.int32)
    log_probs = torch.full((batch.num_tokens, TOP), NO_LOG_PROB)
    for number, (name, width) in enumerate((("first", 48), ("second", 16)), 1):
        ((indices, columns),) = [found for rank in teachers_states[name] for found in rank["tp2+sp"]]
        order = batch.with_columns(at=torch.arange(batch.num_tokens)).select(indices).columns["at"]
        mine = batch.columns["teacher"] == number
        whole = {n: torch.empty_like(column).index_copy(0, order, column)[mine] for n, column in columns.items()}
        hidden[mine, :width] = whole["hidden_states"]
        ids[mine], log_probs[mine] = whole["top_ids"].int(), whole["top_log_probs"]
    return batch.with_columns(teacher_hidden=hidden, teacher_ids=ids, teacher_top_log_probs=log_probs)


def in_buckets(p: torch.Tensor, q: torch.Tensor) -> list[torch.Tensor]:
    """p and q of the likeliest tokens of q, and of all others as one."""
    ids = q.topk(TOP).indices
    parts = [x.gather(-1, ids) for x in (p, q)]
    return [torch.cat([x, 1 - x.sum(-1, keepdim=True) + TAIL], -1) for x in parts]


def dense(
    student: Path, folders: dict[str, Path], batch: Batch, name: str, top_k: bool = False
) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss and its gradient, by hub names, from whole logits in float64, a row at a time."""
    kind = {"dtype": torch.float64, "attn_implementation": "eager"}
    eager = {"experts_implementation": "eager"}  # the only one in float64
    policy = AutoModelForCausalLM.from_pretrained(student, **kind, **eager if "experts" in student.name else {}).eval()
    teachers = [AutoModelForCausalLM.from_pretrained(folders[n], **kind).eval() for n in ("first", "second")]
    loss = torch.zeros((), dtype=torch.float64)
    columns = {n: batch.split(batch.columns[n]) for n in ("teacher", "weight", "distill_weight")}
    for i, ids in enumerate(batch.tokens.split(batch.lengths.tolist())):
        number = int(columns["teacher"][i][0])
        if not number:
            continue
        p = (policy(ids[None]).logits[0, :-1] / TEMPERATURE).softmax(-1)
        with torch.no_grad():
            q = (teachers[number - 1](ids[None]).logits[0, :-1, :45] / TEMPERATURE).softmax(-1)
        p, q = in_buckets(p, q) if top_k else (p, q)
        weights = (columns["weight"][i] * columns["distill_weight"][i])[1:]
        loss = loss + (weights * of_probabilities(name, BETA, p, q)).sum()
    params = list(policy.parameters())  # tied ones once
    for param, gradient in zip(params, torch.autograd.grad(loss, params), strict=True):
        param.data = gradient
    found = {name: tensor.detach() for name, tensor in hub_tensors(policy, policy.config.model_type).items()}
    if policy.config.tie_word_embeddings:
        del found["lm_head.weight"]
    return loss.item(), found


def compare(ranks: list[dict[str, Any]], loss: float, expected: dict[str, torch.Tensor]) -> None:
    gradient = ranks[0]["gradient"]
    assert sorted(gradient) == sorted(expected)
    assert max(t.abs().max().item() for t in expected.values()) > 1e-2, "there is something to compare"
    errors = {n: (gradient[n].double() - t).abs().max().item() for n, t in expected.items()}
    assert not {n: f"{e:.1e}" for n, e in errors.items() if e > 1e-6}
    stats = merge_stats([rank["stats"] for rank in ranks])
    parts = [(1.0, stats["distill/first/divergence"]), (0.5, stats["distill/second/divergence"])]
    assert sum(weight * stat.value for weight, stat in parts) == pytest.approx(loss, abs=1e-6)
    assert stats["distill/divergence"].value == pytest.approx(sum(stat.value for _, stat in parts), abs=1e-6)


@pytest.fixture(scope="module")
def expected(folders: dict[str, Path], batch: Batch) -> Callable[..., tuple[float, dict[str, torch.Tensor]]]:
    """(student, divergence, over the likeliest tokens alone) -> the loss and its gradient by whole logits."""

    @cache
    def of(student: str, name: str, top_k: bool) -> tuple[float, dict[str, torch.Tensor]]:
        return dense(folders[student], folders, batch, name, top_k)

    return of


@pytest.fixture(scope="module")
def found(two_ranks: Ranks, four_ranks: Ranks, folders: dict[str, Path], taught: Batch) -> Answers:
    teachers, groups = [str(folders[name]) for name in ("first", "second")], []
    for is_fast in (True, False):
        for ranks, student, top_k in product((two_ranks, four_ranks), ("student", "experts"), (False, True)):
            cases = {
                case: (layout, case[2])
                for case, layout in CASES.items()
                if (case in FAST, case[0], case[3], case[1] in DEEP) == (is_fast, student, top_k, ranks is four_ranks)
            }
            how = (str(folders[student]), teachers, taught, cases, top_k)
            groups.append((cases, partial(ranks.run, student_gradients, *how, timeout_s=400)))
    return Answers(*groups)


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=() if c in FAST else pytest.mark.full, id=str(c)) for c in CASES]
)
def test_the_gradient_is_that_of_whole_logits(found: Answers, expected: Any, case: Case) -> None:
    """Over the likeliest tokens the divergence is a lower bound of that over the vocabulary."""
    student, layout, name, top_k = case
    compare(found[case], *expected(student, name, top_k))
    assert layout in ("dp2", "ep2", *DEEP) or found[case][0]["num_micros"] > 1
    if top_k:
        assert 0 < expected(student, name, True)[0] < expected(student, name, False)[0]


def test_the_gradient_of_adapters_is_that_of_whole_logits(
    two_ranks: Ranks, folders: dict[str, Path], taught: Batch, expected: Any
) -> None:
    """Of W + s B A with B = 0, of the gradient G of W: s G A^T for B, and 0 for A.  The head is frozen."""
    settings = LoraSettings(rank=2, alpha=6.0)
    cases = {layout: (DENSE[layout], "reverse_kl") for layout in ("tp2+sp", "pp2", "cp2")}
    teachers = [str(folders[name]) for name in ("first", "second")]
    how = (str(folders["student"]), teachers, taught, cases, False, settings)
    ranks = two_ranks.run(student_gradients, *how, timeout_s=240)
    _, of_weights = expected("student", "reverse_kl", False)
    for case in cases:
        found, adapters = ranks[0][case]["gradient"], ranks[0][case]["adapters"]
        assert len(found) == 2 * 7 * 2, "A and B of seven projections of two layers"
        for name, gradient in found.items():
            if ".lora_A." in name:
                assert not gradient.any()
                continue
            weight = name.removeprefix("base_model.model.").replace(".lora_B.", ".")
            a = adapters[name.replace(".lora_B.", ".lora_A.")].double()
            theirs = settings.alpha / settings.rank * of_weights[weight] @ a.T
            assert (gradient.double() - theirs).abs().max() <= 1e-6
        assert max(tensor.abs().max().item() for tensor in found.values()) > 1e-3


def test_a_head_of_a_smaller_vocabulary_is_refused(folders: dict[str, Path]) -> None:
    with pytest.raises(ValueError, match="its vocabulary has 45 tokens; expected at least the 50 of the policy"):
        read_head(folders["first"], vocab_size=50, tp_rank=0, tp_size=1, dtype=torch.float32)
