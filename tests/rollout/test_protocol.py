import hashlib

import pytest
import torch

from megarl.rollout.protocol import (
    Abilities,
    SamplingParams,
    error_message,
    generate_body,
    parse_completions,
    parse_replies,
    tensor_digest,
)
from megarl.sample import Completion, VersionSpan


def item(tokens=(4, 6), spans=None, **meta):
    triples = [[-0.5 * i, token, None] for i, token in enumerate(tokens)]
    meta = {"finish_reason": {"type": "stop"}, "output_token_logprobs": triples, "weight_version": "3", **meta}
    if spans is not None:
        meta["weight_versions"] = [{"version": v, "start": a, "end": b} for v, a, b in spans]
    return {"output_ids": list(tokens), "meta_info": meta}


def test_sampling_params_survive_the_wire():
    params = SamplingParams(0.7, 0.9, 5, 17, 11, (3, 4), True)
    assert SamplingParams.from_json(params.to_json(6)) == (params, 6)


def test_a_missing_seed_stays_missing():
    body = SamplingParams().to_json()
    assert "sampling_seed" not in body
    assert SamplingParams.from_json(body) == (SamplingParams(), 1)


def test_keys_that_only_shape_text_are_accepted():
    assert SamplingParams.from_json({"skip_special_tokens": False, "n": 2}) == (SamplingParams(), 2)


@pytest.mark.parametrize(
    "field",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"temperature": True},
        {"top_p": 1.5},
        {"top_k": 0},
        {"max_new_tokens": 0},
        {"sampling_seed": -1},
        {"sampling_seed": 2**31},
        {"stop_token_ids": (-3,)},
        {"ignore_eos": 1},
    ],
)
def test_an_impossible_value_names_its_field(field):
    with pytest.raises(ValueError, match=next(iter(field))):
        SamplingParams(**field)


def test_the_body_asks_for_log_probs_of_the_completion_only():
    body = generate_body((5, 6), 2, SamplingParams(), "a")
    assert body["input_ids"] == [5, 6]
    assert (body["return_logprob"], body["logprob_start_len"], body["rid"]) == (True, -1, "a")
    assert body["sampling_params"]["n"] == 2


def test_the_body_has_the_salt():
    assert generate_body((5, 6), 1, SamplingParams(), "a", "r.3")["cache_salt"] == "r.3"
    assert generate_body((5, 6), 1, SamplingParams(), "a")["cache_salt"] is None


def test_a_reply_says_how_much_was_cached_where_the_server_does():
    replies = parse_replies([item(cached_tokens=7), item()], 2)
    assert [reply.cached_tokens for reply in replies] == [7, None]
    assert [reply.completion for reply in replies] == parse_completions([item(), item()], 2)


def test_a_reply_becomes_completions():
    spans = (VersionSpan(3, 0, 1), VersionSpan(4, 1, 2))
    reply = [item(spans=[("3", 0, 1), ("4", 1, 2)])]
    assert parse_completions(reply, 1) == [Completion([4, 6], [0.0, -0.5], "stop", spans)]


def test_without_spans_the_whole_completion_has_the_version_of_its_end():
    assert parse_completions(item(), 1)[0].versions == (VersionSpan(3, 0, 2),)


def test_an_empty_completion_has_no_version():
    assert parse_completions(item(tokens=(), weight_version=None), 1)[0].versions == ()


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        ([item(), item()], "holds 2 completions, expected 1"),
        ({"output_ids": [1]}, "meta_info"),
        (item(weight_version="default"), "--weight-version"),
        (item(spans=[("3", 0, 1)]), "do not cover"),
        (item(spans=[("3", 1, 2)]), "do not cover"),
        (item(output_token_logprobs=[[-1.0, 4, None]]), "2 tokens and 1 log-probs"),
        (item(output_token_logprobs=3), "lacks"),
        (item(output_token_logprobs=[[-1.0], [-1.0]]), "lacks"),
        (item(output_token_logprobs=[[-1.0, 4, None], [None, 6, None]]), "the log-prob None"),
    ],
)
def test_a_reply_that_is_not_what_was_asked_is_an_error(reply, words):
    with pytest.raises(ValueError, match=words):
        parse_completions(reply, 1)


def test_abilities_go_by_the_version():
    names = ("update_sessions", "version_spans", "flush_beside_queue", "cache_salt", "frees_adapters", "adapts_experts")
    oldest = dict.fromkeys(names, False)
    assert Abilities.of("0.5.17") == Abilities(**oldest)
    assert Abilities.of("0.5.18") == Abilities(**{**oldest, "cache_salt": True})
    assert Abilities.of("0.5.20") == Abilities(**{**oldest, "cache_salt": True, "version_spans": True})
    newest = dict.fromkeys(oldest, True)
    assert Abilities.of("0.5.21") == Abilities(**{**newest, "frees_adapters": False, "adapts_experts": False})
    assert Abilities.of("0.5.22") == Abilities(**{**newest, "adapts_experts": False})
    for version in ("0.5.23", "0.5.23.post1", "0.6.0", "1.0.0", "megarl-hf", "0.7.dev3", ""):
        assert Abilities.of(version) == Abilities(**newest)


def test_the_digest_is_sha256_of_the_row_major_bytes():
    tensor = torch.arange(6.0).reshape(2, 3)
    assert tensor_digest(tensor) == hashlib.sha256(tensor.numpy().tobytes()).hexdigest()[:16]
    assert tensor_digest(tensor.t()) == hashlib.sha256(tensor.t().contiguous().numpy().tobytes()).hexdigest()[:16]


def test_the_digest_tells_dtypes_and_single_bits_apart():
    tensor = torch.zeros(4, dtype=torch.bfloat16)
    other = tensor.clone()
    other[2] = -0.0
    assert len({tensor_digest(tensor), tensor_digest(other), tensor_digest(tensor.float())}) == 3
    assert len(tensor_digest(torch.tensor(1.0))) == 16


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('{"success": false, "message": "no"}', "no"),
        ('{"error": {"message": "no"}}', "no"),
        ('{"error": "no"}', "no"),
        ("plain", "plain"),
        ("", "Bad Gateway"),
    ],
)
def test_the_sentence_of_an_error_is_found_in_every_shape(text, sentence):
    assert error_message(text, "Bad Gateway") == sentence


def test_a_version_that_is_no_version_is_one_of_a_server_with_all_features() -> None:
    """Python reads no number of more than 4,300 digits."""
    assert Abilities.of("9" * 5000 + ".5.17") == Abilities.of("megarl-hf") == Abilities.of("0.5.23")
    assert Abilities.of("0.5.17") != Abilities.of("0.5.23")
