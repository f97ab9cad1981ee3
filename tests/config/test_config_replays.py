"""Replays of experts and of what sampling left: models and servers that cannot give them are refused."""

from pathlib import Path

import pytest
from config_helpers import EXPERTS, load, refusal
from refusal_table import Block, blocks

from megarl.config import load_config

# ---- actor.router_replay


REFUSED = """
with @dense
actor.router_replay=old | the model has no experts; expected off
rollout.min_p=0.1 | only rollout.top_p and rollout.top_k narrow what is drawn

with @dense
actor.router_replay=rollout | the model has no experts; expected off

rollout.top_p=0.9 | SGLang reports from .. for a rollout.top_k of 1 to 2048 .. expected one, or rollout.engine=hf
rollout.repetition_penalty=1.1 | a server would draw from other
rollout.presence_penalty=1.1 | a server would draw from other logits
actor_rollout_ref.rollout.frequency_penalty=1.1 | a server would draw

with rollout.top_p=0.9
rollout.top_k=2049 | SGLang reports from .. for a rollout.top_k of 1 to 2048 .. expected one, or rollout.engine=hf
rollout.sglang.args=['--preferred-sampling-params={"repetition_penalty":1.1}'] | \
rollout.sglang.args=--preferred-sampling-params | a server would draw from other logits .. expected no such option
"""


@pytest.mark.parametrize("block", blocks(REFUSED), ids=str)
def test_what_cannot_be_replayed_is_refused(block: Block) -> None:
    block.check()


def test_a_bare_off_in_a_file_is_no_truth_value(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("actor:\n  router_replay: off\nmodel:\n  path: x\ndata:\n  train_files: [y]\n")
    assert load_config([f"recipe={recipe}"])[0].actor.router_replay == "off"


LOSES = """
--enable-hierarchical-cache | KV that comes back from host memory has lost its experts
--enable-hicache | KV that comes back from host memory has lost its experts
--enable-lmcache | KV that comes back from elsewhere has lost its experts
--radix-cache-backend=own | KV that comes back from elsewhere has lost its experts
--enable-prefill-cp | each GPU notes experts of its part of a prompt
--enable-two-batch-overlap | the experts of one half of a batch are written over those of the other half
"""


@pytest.mark.parametrize("row", LOSES.strip().splitlines())
def test_servers_that_lose_the_experts_of_tokens_are_refused(row: str) -> None:
    option, why = row.split(" | ")
    words = (*EXPERTS.split(), f"rollout.sglang.args=['{option}']", "rollout.engine=sglang")
    said = refusal("actor.router_replay=rollout", *words)
    assert said.startswith(f"rollout.sglang.args={option}: {why}")
    assert said.endswith("; expected actor.router_replay=off or old, or no such option")
    load("actor.router_replay=old", *words)


# ---- rollout.top_p and rollout.top_k

SGLANG = "rollout.engine=sglang"
ONLY = "SGLang reports from which tokens it drew only for a rollout.top_k of 1 to"


@pytest.mark.parametrize("words", [["rollout.top_k=20"], ["rollout.top_p=0.9", "rollout.top_k=2048"], []])
def test_what_sglang_tells_is_allowed(words: list[str]) -> None:
    assert load(SGLANG, *words).narrows_sampling == bool(words)


@pytest.mark.parametrize("words", ["['--sampling-mask-max-tokens=8000']", "['--sampling-mask-max-tokens','8000']"])
def test_another_limit_of_the_server_counts(words: str) -> None:
    more = f"rollout.sglang.args={words}"
    load(SGLANG, "rollout.top_k=4000", more)
    assert f"{ONLY} 4000, half of" in refusal(SGLANG, "rollout.top_k=4001", more)
    assert f"{ONLY} 4000, half of" in refusal(SGLANG, "rollout.top_p=0.5", more)


def test_evaluations_are_sampled_as_they_like() -> None:
    load(SGLANG, "data.val_files=[v.jsonl]", "rollout.val_kwargs.top_p=0.7", "rollout.val_kwargs.temperature=1.0")
