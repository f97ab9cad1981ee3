"""rollout.top_p and rollout.top_k: servers that cannot tell from which tokens they drew are refused in one sentence."""

from __future__ import annotations

import pytest
from config_helpers import load, refusal

SGLANG = "rollout.engine=sglang"
ONLY = "SGLang tells from which tokens it drew only for a rollout.top_k of 1 to"


@pytest.mark.parametrize(
    ("words", "given"),
    [
        (["rollout.top_p=0.9"], "rollout.top_p=0.9"),
        (["rollout.top_p=0.9", "rollout.top_k=2049"], "rollout.top_k=2049"),
    ],
)
def test_sglang_needs_a_top_k_within_half_its_limit(words: list[str], given: str) -> None:
    """The other half is for tokens that are as likely as the last of the k."""
    said = f"{given}: {ONLY} 2048, half of --sampling-mask-max-tokens; expected one, or rollout.engine=hf"
    assert refusal(SGLANG, *words) == said
    assert refusal(*words).startswith(f"{given}: "), "an engine that is not chosen yet is checked as sglang"
    load("rollout.engine=hf", *words)


@pytest.mark.parametrize("words", [["rollout.top_k=20"], ["rollout.top_p=0.9", "rollout.top_k=2048"], []])
def test_what_sglang_tells_is_allowed(words: list[str]) -> None:
    assert load(SGLANG, *words).narrows_sampling == bool(words)


@pytest.mark.parametrize("words", ["['--sampling-mask-max-tokens=8000']", "['--sampling-mask-max-tokens','8000']"])
def test_another_limit_of_the_server_counts(words: str) -> None:
    more = f"rollout.sglang.args={words}"
    load(SGLANG, "rollout.top_k=4000", more)
    assert f"{ONLY} 4000, half of" in refusal(SGLANG, "rollout.top_k=4001", more)
    assert f"{ONLY} 4000, half of" in refusal(SGLANG, "rollout.top_p=0.5", more)


def test_drafted_tokens_have_no_known_support() -> None:
    eagle = "rollout.sglang.args=['--speculative-algorithm=EAGLE','--speculative-draft-model-path=x/DFLASH-1']"
    assert refusal(SGLANG, "rollout.top_k=20", eagle) == (
        "rollout.sglang.args=--speculative-algorithm=EAGLE: with it SGLang does not tell from which tokens it drew; "
        "expected DFLASH or DSPARK, no such option, or rollout.top_p=1 and rollout.top_k=-1"
    )
    load(SGLANG, eagle)


@pytest.mark.parametrize("words", ["', 'DFLASH", "=DSPARK", "=dflash"])
def test_drafts_of_which_sglang_tells_are_allowed(words: str) -> None:
    load(SGLANG, "rollout.top_k=20", f"rollout.sglang.args=['--speculative-algorithm{words}']")


@pytest.mark.parametrize("narrowed", [[], ["rollout.top_k=20"]])
def test_what_servers_would_add_to_every_request_is_refused(narrowed: list[str]) -> None:
    words = """rollout.sglang.args=['--preferred-sampling-params={"repetition_penalty":1.1}']"""
    assert refusal(SGLANG, words, *narrowed) == (
        "rollout.sglang.args=--preferred-sampling-params: a server would draw from other logits than those of which "
        "the trainer computes log-probs; expected no such option"
    )


def test_evaluations_are_sampled_as_they_like() -> None:
    load(SGLANG, "data.val_files=[v.jsonl]", "rollout.val_kwargs.top_p=0.7", "rollout.val_kwargs.temperature=1.0")


@pytest.mark.parametrize("name", ["repetition_penalty", "presence_penalty", "frequency_penalty"])
def test_penalties_are_refused_with_the_reason(name: str) -> None:
    why = "a server would draw from other logits than those of which the trainer computes log-probs"
    for key in (f"rollout.{name}", f"actor_rollout_ref.rollout.{name}"):
        assert refusal(f"{key}=1.1").endswith(f"there is no key rollout.{name}, because {why}")
    assert refusal("rollout.min_p=0.1").endswith("because only rollout.top_p and rollout.top_k narrow what is drawn")
