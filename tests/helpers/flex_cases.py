"""FlexAttention over prefix trees: beside its definition, and on CPUs.

On CPUs torch's own definition of it is computed, forwards and backwards, by the calls that are made on GPUs.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from attention_cases import Heads
from torch import Tensor
from torch.nn.attention import flex_attention as flex

from megarl.data.prefix_tree import CommonPrefixes, PrefixTree
from megarl.mcore.models.prefix_trees import flex_tree
from megarl.mcore.models.prefix_trees.flex_tree import FlexPlan
from megarl.mcore.training import packed_rows
from megarl.samples.batch import Batch


@contextmanager
def on_cpus() -> Iterator[None]:
    """Rows that share prefixes are attended to as on GPUs.

    torch refuses gradients on CPUs because there is no kernel for them; its definition has them.
    """
    with ExitStack() as patches:
        patches.enter_context(counted("aot_eager"))
        patches.enter_context(mock.patch.object(flex, "_validate_device", lambda *_: None))
        patches.enter_context(mock.patch.dict(packed_rows.PLANS, cpu=FlexPlan))
        yield


@contextmanager
def counted(backend: Any) -> Iterator[None]:
    """Calls of FlexAttention are traced as on GPUs, and what is traced goes to this backend of torch.compile."""
    torch._dynamo.reset()
    compiled = torch.compile(flex.flex_attention, dynamic=True, fullgraph=True, backend=backend)
    with mock.patch.object(flex_tree, "fused", lambda: compiled):
        yield


def tree_of(rows: list[list[int]]) -> PrefixTree:
    batch = Batch(torch.tensor(sum(rows, [])), torch.tensor([len(row) for row in rows]))
    return PrefixTree.of(batch, CommonPrefixes.of(batch))


def answers(prompt: int, lengths: list[int]) -> PrefixTree:
    """Of a prompt of so many tokens, and answers to it of these."""
    g = torch.Generator().manual_seed(0)
    begin = torch.randint(0, 99, (prompt,), generator=g).tolist()
    return tree_of([[*begin, *torch.randint(0, 99, (n,), generator=g).tolist()] for n in lengths])


def sees(tree: PrefixTree, window: int | None) -> Tensor:
    """[T, T] bool: slow reference, node by node."""
    at, found = tree.place_positions, torch.zeros(tree.num_places, tree.num_places, dtype=torch.bool)
    for node, (first, length) in enumerate(zip(tree.places.tolist(), tree.lengths.tolist(), strict=True)):
        own = found[first : first + length]
        own[:, first : first + length] = torch.ones(length, length, dtype=torch.bool).tril()
        above = int(tree.parents[node])
        while above >= 0:
            begin = tree.places[above]
            own[:, begin : begin + tree.lengths[above] - 1] = True
            above = int(tree.parents[above])
    if window is not None:
        found &= torch.from_numpy(at[:, None] - at < window)
    return found


def reference(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, mask: Tensor, scale: float) -> Tensor:
    """One masked softmax: q [T, n, d], k [T, m, d], v [T, m, e], sinks [n], mask [T, T] -> [T, n, e]."""
    times = q.size(1) // k.size(1)
    k, v = (x.repeat_interleave(times, 1) for x in (k, v))
    scores = torch.einsum("qnd,knd->qnk", q, k) * scale
    scores = scores.masked_fill(~mask[:, None], -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(1, -1, 1).expand(len(q), -1, 1)], -1)
    return torch.einsum("qnk,knd->qnd", scores.softmax(-1)[..., : len(k)], v)


KINDS = {
    "grouped queries": Heads(8, 2, 128, 128),
    "latent": Heads(4, 4, 192, 128),
    "windows and sinks": Heads(8, 1, 64, 64, window=100, has_sinks=True),
    "uneven groups": Heads(6, 2, 80, 80, window=100),
    "narrow": Heads(4, 2, 8, 8),
}


def inputs_of(
    kind: Heads, tree: PrefixTree, dtype: torch.dtype, device: torch.device
) -> tuple[list[Tensor], Tensor | None]:
    """q, k and v of a row of whole blocks, parts of one tensor as Megatron's layers have them, and sinks."""
    g = torch.Generator().manual_seed(1)
    places = -(-tree.num_places // FlexPlan.UNIT) * FlexPlan.UNIT
    sizes = [kind.queries * kind.key_size, kind.pairs * kind.key_size, kind.pairs * kind.value_size]
    heads = [kind.queries, kind.pairs, kind.pairs]
    row = torch.randn(places, sum(sizes), generator=g).to(device, dtype)
    inputs = [x.unflatten(1, (n, -1)).requires_grad_() for x, n in zip(row.split(sizes, 1), heads, strict=True)]
    sinks = torch.randn(kind.queries, generator=g).to(device, dtype).requires_grad_() if kind.has_sinks else None
    return inputs, sinks


def errors(kind: Heads, tree: PrefixTree, dtype: torch.dtype, device: torch.device) -> dict[str, float]:
    """|got - exact| / |exact| of the outputs and of all gradients; exact: the definition, in float64."""
    inputs, sinks = inputs_of(kind, tree, dtype, device)
    leaves = [*inputs, *([sinks] if sinks is not None else [])]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    count, scale = tree.num_places, kind.key_size**-0.5
    got = FlexPlan.of(tree, device).attend(*inputs, sinks, kind.window, scale)
    assert not got[count:].any(), "padding"
    mask = sees(tree, kind.window).to(device)
    of_rows = [x[:count] for x in exact[:3]]
    expected = reference(*of_rows, exact[3] if sinks is not None else None, mask, scale)
    up = torch.randn(got.shape, generator=torch.Generator().manual_seed(2)).to(device, dtype)
    ours = torch.autograd.grad(got, leaves, up)
    theirs = torch.autograd.grad(expected, exact, up[:count].double())
    pairs = zip((got[:count], *ours), (expected, *theirs), strict=True)
    found = [((a.double() - b).norm() / b.norm()).item() for a, b in pairs]
    return dict(zip(("output", "queries", "keys", "values", "sinks"), found, strict=False))
