"""A column that no code knows, all the way: two replies, a sample, a pipe, files, a batch, packing, a rank's tokens."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from columns_cases import receive, routes_of, token_of
from spawn import Ranks
from wire import reply_item

from megarl.batch import Batch
from megarl.data.batch import make_batch, mini_batches
from megarl.data.groups import load_groups, save_groups
from megarl.data.packing import plan
from megarl.layout import Layout
from megarl.processes.connection import to_bytes
from megarl.roles.columns import payload
from megarl.rollout.collector.messages import pack, unpack
from megarl.rollout.pieces import join
from megarl.rollout.protocol import parse_completions
from megarl.sample import Completion, Prompt, Sample

pytestmark = pytest.mark.dist
NUM_GROUPS, N = 6, 3


def answered(visit: int) -> list[Sample]:
    """A group whose replies bring the column "routes"; sample i of the run has prompts and answers of other lengths."""
    prompt_length = 2 + visit % 3
    # Each sample has its own prompt here, so that every token of the run is another one.
    group = []
    for index in range(N):
        sample = N * visit + index
        prompt = Prompt(f"0-{visit}", [token_of(sample, t) for t in range(prompt_length)], "")
        length = prompt_length + 1 + (5 * sample) % 7
        cut = (prompt_length + length + 1) // 2  # a piece ends here; the next one is of newer weights
        first, second = _piece(sample, prompt_length, cut, version=3), _piece(sample, cut, length, version=4)
        completion = join(first, second, prompt_length) if second.token_ids else first
        group += unpack(pickle.loads(pickle.dumps(pack([Sample.of(prompt, completion, 1.0)]))), prompt)
    return group


def _piece(sample: int, start: int, end: int, *, version: int) -> Completion:
    """The answer to a request of `start` tokens.  Newer weights chose other routes for the tokens before: not ours."""
    routes = np.array([routes_of(sample, t) ^ (version if 2 + sample // N % 3 <= t < start else 0) for t in range(end)])
    new = [token_of(sample, t) for t in range(start, end)]
    item = reply_item(new, [-0.5] * len(new), [(version, 0, len(new))], {"routes": routes})
    (completion,) = parse_completions(json.loads(json.dumps(item)), 1, num_asked=start)
    return completion


@pytest.fixture(scope="module")
def four_ranks() -> Iterator[Ranks]:
    with Ranks(4) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def batch(tmp_path_factory: pytest.TempPathFactory) -> Batch:
    """The groups waited in the files of a checkpoint; the step has them in another order."""
    folder: Path = tmp_path_factory.mktemp("checkpoint")
    waiting = {N * visit + i: [sample] for visit in range(NUM_GROUPS) for i, sample in enumerate(answered(visit))}
    save_groups(folder, waiting)
    groups = list(load_groups(folder).values())
    batch = make_batch(groups)
    step = batch.select([at for members in mini_batches(batch, 1, seed=4) for at in members])
    assert step.columns["routes"].dtype == torch.uint16
    assert set(step.columns["versions"].tolist()) == {-1, 3, 4}
    return step


def check(ranks: Ranks, layout: Layout, num_replicas: int, batch: Batch, *, dummies: list[int]) -> None:
    plans = plan(batch.lengths.tolist(), num_replicas, max_tokens=30)
    payloads = [bytes(to_bytes(payload(batch, part, ("routes",)))) for part in plans]
    found = ranks.run(receive, layout, payloads, timeout_s=600)
    assert [rank["dummies"] for rank in found] == dummies
    copies = layout.tp * layout.pp
    seen = sorted(token for rank in found for token in rank["tokens"])
    assert seen == sorted(token for token in batch.tokens.tolist() for _ in range(copies)), "each token, on each copy"


def test_on_tensor_and_context_parallel_ranks(four_ranks: Ranks, batch: Batch) -> None:
    check(four_ranks, Layout(tp=2, cp=2, sequence_parallel=True), 1, batch, dummies=[0] * 4)


def test_on_virtual_stages_of_two_replicas(four_ranks: Ranks, batch: Batch) -> None:
    check(four_ranks, Layout(pp=2, vpp=2), 2, batch, dummies=[1] * 4)


def test_on_all_of_them_at_once(batch: Batch) -> None:
    with Ranks(8) as ranks:
        check(ranks, Layout(tp=2, cp=2, pp=2, vpp=2, sequence_parallel=True), 1, batch, dummies=[1] * 8)
