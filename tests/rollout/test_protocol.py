import pytest
from wire import parse_completions

from megarl.rollout.protocol import (
    Abilities,
    SamplingParams,
    error_message,
    generate_body,
    parse_replies,
)
from megarl.samples.sample import Completion, VersionSpan


def item(tokens=(4, 6), spans=None, **meta):
    triples = [[-0.5 * i, token, None] for i, token in enumerate(tokens)]
    meta = {"finish_reason": {"type": "stop"}, "output_token_logprobs": triples, "weight_version": "3", **meta}
    if spans is not None:
        meta["weight_versions"] = [{"version": v, "start": a, "end": b} for v, a, b in spans]
    return {"output_ids": list(tokens), "meta_info": meta}


def test_sampling_params_survive_the_wire():
    params = SamplingParams(0.7, 0.9, 5, 17, 11, (3, 4), True)
    assert SamplingParams.from_json(params.to_json(6)) == (params, 6)
    body = SamplingParams().to_json()
    assert "sampling_seed" not in body, "a missing seed stays missing"
    assert SamplingParams.from_json(body) == (SamplingParams(), 1)
    assert SamplingParams.from_json({"skip_special_tokens": False, "n": 2}) == (SamplingParams(), 2), "of text alone"


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


def test_the_body_asks_for_log_probs_of_the_completion_only_and_has_the_salt():
    body = generate_body((5, 6), 2, SamplingParams(), "a", "r.3")
    assert body["input_ids"] == [5, 6]
    assert (body["return_logprob"], body["logprob_start_len"], body["rid"]) == (True, -1, "a")
    assert (body["sampling_params"]["n"], body["cache_salt"]) == (2, "r.3")
    assert generate_body((5, 6), 1, SamplingParams(), "a")["cache_salt"] is None


def test_a_reply_says_how_much_was_cached_where_the_server_does():
    replies = parse_replies([item(cached_tokens=7), item()], 2)
    assert [reply.cached_tokens for reply in replies] == [7, None]
    assert [reply.completion for reply in replies] == parse_completions([item(), item()], 2)


def test_a_reply_becomes_completions():
    spans = (VersionSpan(3, 0, 1), VersionSpan(4, 1, 2))
    reply = [item(spans=[("3", 0, 1), ("4", 1, 2)])]
    assert parse_completions(reply, 1) == [Completion([4, 6], [0.0, -0.5], "stop", spans)]
    assert parse_completions(item(), 1)[0].versions == (VersionSpan(3, 0, 2),), "the whole has the version of its end"
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


ABILITIES = (
    "cache_salt",
    "version_spans",
    "update_sessions",
    "flush_beside_queue",
    "frees_adapters",
    "adapts_experts",
    "rereads_fp8",
)


@pytest.mark.parametrize(
    ("version", "num"),  # of the abilities, in the order in which SGLang got them
    [
        *[("0.5.17", 0), ("0.5.18", 1), ("0.5.20", 2), ("0.5.21", 4), ("0.5.22", 5)],
        *((version, 7) for version in ("0.5.23", "0.5.23.post1", "0.6.0", "1.0.0", "megarl-hf", "0.7.dev3", "")),
        ("9" * 5000 + ".5.17", 7),  # Python reads no number of more than 4,300 digits
    ],
    ids=lambda value: str(value)[:20],
)
def test_abilities_go_by_the_version(version, num):
    assert Abilities.of(version) == Abilities(**{name: at < num for at, name in enumerate(ABILITIES)})


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
