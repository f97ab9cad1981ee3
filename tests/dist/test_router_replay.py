"""Routing replay under every layout: given experts are those of the tokens, and routers learn as by the definition.

The experts are random, so that no router would choose them: a token that got those of another one would show.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from parity_compare import TOLERANCE, assert_same_gradient
from rank_answers import Answers
from replay_cases import TEMPERATURE, Replayed, make_batch, run_replayed, whole_column
from spawn import Ranks, run_ranks
from tiny_models import LACKING, read_config, write_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from megarl.arch.layout import Layout
from megarl.arch.model_types import SPARSE_LATENT
from megarl.arch.routed_experts import ROUTED_EXPERTS
from megarl.hf_server.hub_names import hub_tensors
from megarl.mcore.models.execution import ExecutionOptions
from megarl.samples.batch import Batch

pytestmark = [pytest.mark.full, pytest.mark.dist]

# The last stage of four layers has experts in both, and in Qwen3-MoE one stage has a layer without.
SP: dict[str, Any] = {"tp": 2, "sequence_parallel": True}
LAYOUTS: dict[int, dict[str, Layout]] = {
    1: {"one": Layout()},
    2: {
        "dp2": Layout(),
        "tp2+sp": Layout(**SP),
        "ep2": Layout(ep=2),
        "pp2": Layout(pp=2),
        "pp2 vpp2": Layout(pp=2, vpp=2),
        "cp2": Layout(cp=2),
    },
    4: {"tp2+sp cp2 ep2": Layout(**SP, cp=2, ep=2), "tp2+sp pp2 vpp2": Layout(**SP, pp=2, vpp=2)},
}
RECOMPUTED = {
    "uniform": ExecutionOptions(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1),
    "block": ExecutionOptions(recompute_granularity="full", recompute_method="block", recompute_num_layers=1),
}
MANY = "more experts than a byte can tell"
SIZES: dict[str, tuple[str, dict[str, int]]] = {MANY: ("qwen3_moe", {"num_experts": 264, "moe_intermediate_size": 8})}
# Every layout for one family; the others, whose routers compute otherwise, on one rank, with what cuts tokens, or with
# experts on several ranks.
OF_FAMILY: dict[str, tuple[str, ...]] = {
    "qwen3_moe": tuple(name for layouts in LAYOUTS.values() for name in layouts),
    "deepseek_v3": ("one", "tp2+sp", "pp2 vpp2", "cp2", "ep2"),
    "gpt_oss": ("one", "ep2", "cp2"),
    **dict.fromkeys(("qwen3_moe_plain", "mixtral", "glm4_moe", "minimax_m2"), ("one", "tp2+sp")),
    MANY: ("one", "tp2+sp", "cp2"),
    **{family: ("one", "tp2+sp", "cp2", "ep2") for family in SPARSE_LATENT if family not in LACKING},
}
FAMILIES = tuple(OF_FAMILY)
EVERYWHERE = ("qwen3_moe_plain", "mixtral", "minimax_m2", "gpt_oss")  # experts in all layers
NAMES = [(family, name) for family, names in OF_FAMILY.items() for name in names]
AGAIN = [
    *((FAMILIES[0], name, how) for name in ("one", "pp2", "pp2 vpp2", "tp2+sp", "cp2") for how in RECOMPUTED),
    ("deepseek_v3", "ep2", "block"),
]
FREE = [(FAMILIES[0], name) for name in OF_FAMILY[FAMILIES[0]]] + [(MANY, name) for name in OF_FAMILY[MANY]]
WIDE = "one micro-batch"


def scores_of(config: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """(logits [T, E], experts [T, K]) -> the weights of given experts [T, K]: their scores, as a family normalises."""
    if config.model_type in ("deepseek_v3", "glm4_moe", "minimax_m2", *SPARSE_LATENT):
        factor = getattr(config, "routed_scaling_factor", 1.0)

        def sigmoid(logits: Tensor, experts: Tensor) -> Tensor:
            scores = logits.sigmoid().gather(1, experts)
            return factor * scores / (scores.sum(-1, keepdim=True) + 1e-20)

        return sigmoid

    def softmax(logits: Tensor, experts: Tensor) -> Tensor:
        scores = logits.softmax(-1).gather(1, experts)
        renormalised = config.model_type in ("mixtral", "gpt_oss") or config.norm_topk_prob
        return scores / scores.sum(-1, keepdim=True) if renormalised else scores

    return softmax


def routers_of(model: nn.Module) -> list[nn.Module]:
    """Those of all layers, in order; each returns (logits, weights, experts)."""
    layers = [module for module in model.modules() if isinstance(getattr(module, "experts", None), nn.Module)]
    return [layer.router if hasattr(layer, "router") else layer.gate for layer in layers]


class Replaying:
    """A model whose routers take the experts of one row at a time."""

    def __init__(self, folder: str) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
        self.given: list[Tensor] = []  # of the row, by layer
        for number, router in enumerate(routers_of(self.model)):
            router.register_forward_hook(self._router(number))

    def _router(self, number: int) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
        scores = scores_of(self.model.config)

        def replace(_: nn.Module, __: Any, output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
            logits = output[0].view(-1, output[0].size(-1))
            return output[0], scores(logits, self.given[number]), self.given[number]

        return replace

    def log_probs(self, tokens: Tensor, experts: Tensor) -> Tensor:
        """tokens [T], experts [T, layers, K] as the column has them -> [T], 0 for the first token."""
        # The token at t is read by the pass that predicts the one at t + 1; the last one may go anywhere.
        last = torch.arange(experts.size(2)).expand(1, *experts.shape[1:])
        self.given = list(torch.cat([experts[1:].long(), last]).unbind(1))
        logits = self.model(input_ids=tokens[None], use_cache=False).logits[0, :-1] / TEMPERATURE
        found = torch.log_softmax(logits, -1).gather(1, tokens[1:, None])[:, 0]
        return torch.cat([found.new_zeros(1), found])


def reference_step(folder: str, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """The log-probs of all tokens, and the gradient of their weighted sum by name."""
    replaying = Replaying(folder)
    rows = zip(
        batch.tokens.split(batch.lengths.tolist()),
        batch.columns[ROUTED_EXPERTS].split(batch.lengths.tolist()),
        strict=True,
    )
    log_probs = torch.cat([replaying.log_probs(*row) for row in rows])
    (batch.columns["weight"] * log_probs).sum().backward()
    return log_probs.detach(), _gradient(replaying.model)


def _gradient(model: nn.Module) -> dict[str, Tensor]:
    """By the names of a hub folder, which has each expert's matrices for themselves."""
    for param in model.parameters():
        param.data = torch.zeros_like(param) if param.grad is None else param.grad
    config: Any = model.config
    return {name: tensor.detach().clone() for name, tensor in hub_tensors(model, config.model_type).items()}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("replay")
    sizes = {family: SIZES.get(family, (family, {})) for family in FAMILIES}
    return {name: write_model(root / name, of, tied=False, seed=1, **own) for name, (of, own) in sizes.items()}


@pytest.fixture(scope="module")
def batches(folders: dict[str, Path]) -> dict[str, Batch]:
    return {family: make_batch(read_config(folder)) for family, folder in folders.items()}


@pytest.fixture(scope="module")
def references(folders: dict[str, Path], batches: dict[str, Batch]) -> dict[str, tuple[Tensor, dict[str, Tensor]]]:
    return {family: reference_step(str(folder), batches[family]) for family, folder in folders.items()}


@pytest.fixture(scope="module")
def found(folders: dict[str, Path]) -> Answers:
    """(family, layout) with given experts; (family, layout, how) computed again; (family, layout, "free").

    And (family, "one", WIDE): in one micro-batch.
    """
    groups = [(size, family, _cases(family, layouts)) for size, layouts in LAYOUTS.items() for family in FAMILIES]
    run = partial(run_ranks, timeout_s=600)
    return Answers(*((cases, partial(run, n, run_replayed, str(folders[of]), cases)) for n, of, cases in groups))


def _cases(family: str, layouts: dict[str, Layout]) -> dict[tuple[str, ...], Replayed]:
    """Those of a family in these layouts."""
    every = {key: Replayed(layouts.get(key[1])) for key in NAMES}
    every |= {key: Replayed(layouts.get(key[1]), RECOMPUTED[key[2]]) for key in AGAIN}
    every |= {(*key, "free"): Replayed(layouts.get(key[1]), given=False) for key in FREE}
    every[FAMILIES[0], "one", WIDE] = Replayed(layouts.get("one"), max_tokens=1000)
    return {key: case for key, case in every.items() if key[0] == family and key[1] in layouts}


def trained(gradient: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without the biases that choose experts, which have no gradient: exported in its place is the bias itself."""
    return {name: tensor for name, tensor in gradient.items() if not name.endswith("e_score_correction_bias")}


@pytest.mark.parametrize(("family", "layout"), NAMES)
def test_log_probs_and_gradient_with_given_experts_are_those_of_the_definition(
    found: Answers, batches: dict, references: dict, family: str, layout: str
) -> None:
    log_probs = whole_column(found[family, layout], "log_probs", batches[family])
    assert (log_probs - references[family][0]).abs().max() < 1e-4
    expected = trained(references[family][1])
    routers = [tensor for name, tensor in expected.items() if name.endswith(("gate.weight", "router.weight"))]
    assert len(routers) == (4 if family in EVERYWHERE else 3)
    assert all(tensor.abs().max() > 1e-4 for tensor in routers), "routers learn"
    assert_same_gradient(trained(found[family, layout][0]["gradient"]), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_layout_changes_the_gradient(found: Answers, family: str) -> None:
    expected = trained(found[family, "one"][0]["gradient"])
    for name in (name for each, name in NAMES if each == family):
        assert_same_gradient(trained(found[family, name][0]["gradient"]), expected)


@pytest.mark.parametrize(("family", "layout", "how"), AGAIN)
def test_layers_computed_again_get_the_same_experts(found: Answers, family: str, layout: str, how: str) -> None:
    """Several micro-batches are under way in each stage when the first of them is computed again."""
    one, again = (trained(found[key][0]["gradient"]) for key in ((family, "one"), (family, layout, how)))
    assert_same_gradient(again, one)


def test_the_split_into_micro_batches_changes_nothing(found: Answers, batches: dict) -> None:
    family = FAMILIES[0]
    small, wide = found[family, "one"], found[family, "one", WIDE]
    assert_same_gradient(wide[0]["gradient"], small[0]["gradient"])
    log_probs = [whole_column(ranks, "log_probs", batches[family]) for ranks in (small, wide)]
    assert (log_probs[0] - log_probs[1]).abs().max() <= TOLERANCE * log_probs[0].abs().max()


def test_routers_alone_would_choose_others(found: Answers, batches: dict) -> None:
    """The negative control."""
    family = FAMILIES[0]
    both = (found[family, "one"], found[family, "one", "free"])
    given, free = (whole_column(ranks, "log_probs", batches[family]) for ranks in both)
    assert (given - free).abs().max() > 0.1


@pytest.mark.parametrize(("family", "layout"), FREE)
def test_every_layout_notes_the_same_experts(found: Answers, batches: dict, family: str, layout: str) -> None:
    batch = batches[family]
    one, other = (whole_column(found[family, name, "free"], ROUTED_EXPERTS, batch) for name in ("one", layout))
    dtype = torch.uint16 if family == MANY else torch.uint8
    assert (other.dtype, other.shape) == (dtype, (batch.num_tokens, 3, 2))
    one, other = one.long(), other.long()  # torch has few operations for uint16
    assert not other[batch.row_starts].any(), "nothing predicts a row's first token"
    assert torch.equal(other, one)
    assert (other.max() > 255) == (family == MANY)


def test_noted_experts_give_the_same_log_probs_when_they_are_given(
    one_rank: Ranks, found: Answers, folders: dict[str, Path], batches: dict
) -> None:
    family = FAMILIES[0]
    batch, free = batches[family], found[family, "one", "free"]
    noted = batch.with_columns(**{ROUTED_EXPERTS: whole_column(free, ROUTED_EXPERTS, batch)})
    again = one_rank.run(run_replayed, str(folders[family]), {"again": Replayed()}, noted, timeout_s=200)
    log_probs = whole_column([rank["again"] for rank in again], "log_probs", batch)
    expected = whole_column(free, "log_probs", batch)
    assert (log_probs - expected).abs().max() <= TOLERANCE * expected.abs().max()
