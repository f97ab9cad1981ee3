"""What servers tell of the tokens that could be drawn, where top-p and top-k narrow the distribution."""

from __future__ import annotations

import uuid

import pytest
import torch
from tiny_server import OLD, PARAMS, VARIANTS

from megarl.rollout.engine_support import EngineSupport
from megarl.rollout.protocol import Route, SamplingParams, generate_body, parse_replies
from megarl.sample import SUPPORT

PROMPT = [5, 6, 7, 8]
NARROW = {"temperature": 0.8, "top_p": 0.7, "top_k": 20, "max_new_tokens": 12, "ignore_eos": True}
TOLD = [EngineSupport(0.7, 20)]
CLOSE = 1e-4  # of float32 sums of other kernels, as everywhere between a server and transformers

telling = pytest.mark.parametrize("any_served", [p for p in PARAMS if VARIANTS[p.id].version != OLD], indirect=True)
rebuilding = pytest.mark.parametrize("any_served", [p for p in PARAMS if VARIANTS[p.id].version == OLD], indirect=True)


@pytest.fixture
def server(any_server):
    return any_server


def completions(server, columns):
    found = []
    for seed in (4, 5):
        body = generate_body(PROMPT, 1, SamplingParams(**NARROW, sampling_seed=seed), uuid.uuid4().hex, columns=columns)
        reply = server.ask(Route.GENERATE, body)
        assert reply.status_code == 200, reply.text
        ((completion, *_),) = parse_replies(reply.json(), 1, num_asked=len(PROMPT), columns=columns)
        found.append(completion)
    return found


def log_softmax(reference, token_ids):
    """[tokens, V] of the distributions that the new tokens were drawn from, before they were narrowed."""
    with torch.no_grad():
        logits = reference(torch.tensor([PROMPT + token_ids])).logits[0, len(PROMPT) - 1 : -1].double()
    return (logits / NARROW["temperature"]).log_softmax(-1)


@telling
def test_the_support_of_each_token_and_log_probs_over_it(server, reference):
    for completion in completions(server, TOLD):
        column = completion.columns[SUPPORT]
        assert column.shape == (len(PROMPT) + 12, None)
        lists = column.lists()
        assert lists[: len(PROMPT)] == [[]] * len(PROMPT), "the request's tokens were not drawn"
        log_p = log_softmax(reference, completion.token_ids)
        for ids, token, log_prob, own in zip(
            lists[len(PROMPT) :], completion.token_ids, completion.log_probs, log_p, strict=True
        ):
            assert token in ids
            assert len(set(ids)) == len(ids)
            assert log_prob == pytest.approx(float(own[token] - own[ids].logsumexp(0)), abs=CLOSE)
            # The likeliest, as long as those before have less than 0.7: but for the rounding at the border.
            p, order = own.exp().sort(descending=True)
            before = p.cumsum(0) - p
            # SGLang also keeps tokens that are as likely as the 20th.
            sure, possible = before < 0.7 - CLOSE, (before < 0.7 + CLOSE) & (p > p[19] * (1 - CLOSE))
            assert set(order[sure][:20].tolist()) <= set(ids) <= set(order[possible].tolist())


@telling
def test_without_the_wish_nothing_is_told(server):
    told, plain = completions(server, TOLD), completions(server, [])
    assert not [c for c in plain if c.columns]
    if server.variant.engine == "hf":  # SGLang takes no seed of a request without deterministic inference
        assert [c.token_ids for c in told] == [c.token_ids for c in plain]


@telling
def test_a_server_says_of_how_many_tokens_it_tells_at_most(server):
    assert server.engine.server_info()["sampling_mask_max_tokens"] == (None if server.variant.engine == "hf" else 4096)


@rebuilding
def test_a_server_that_rebuilds_the_support_after_the_draw_is_known_by_its_info(server):
    assert "sampling_mask_max_tokens" not in server.engine.server_info()
