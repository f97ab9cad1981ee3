"""Whole small runs with agents: what the servers wrote in many turns is what the ranks learn, each token once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ring_cases import CHAT, lines, make_parts, settings, steps

from megarl.cli import main

pytestmark = pytest.mark.dist

GRPO = ["algorithm.adv_estimator=grpo", "trainer.n_gpus_per_node=1", "agent.max_tokens=80", "trainer.test_freq=-1"]

# Two turns through the endpoint, which says how many tokens the servers wrote.
ENDPOINT = """
import json
import aiohttp

async def episode(base_url, api_key, prompt, log):
    messages = [{"role": "user", "content": prompt.text}]
    headers, num_tokens = {"Authorization": f"Bearer {api_key}"}, 0
    async with aiohttp.ClientSession(headers=headers) as http:
        for _ in range(2):
            body = {"model": "policy", "messages": messages}
            async with http.post(f"{base_url}/chat/completions", json=body) as reply:
                said = await reply.json()
            num_tokens += said["usage"]["completion_tokens"]
            messages += [said["choices"][0]["message"], {"role": "user", "content": "again"}]
    with open(log, "a") as file:
        print(json.dumps([prompt.uid, num_tokens]), file=file)
"""


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_parts(tmp_path_factory.mktemp("parts"))


@pytest.mark.slow
def test_ranks_learn_the_turns_of_episodes_as_the_servers_wrote_them(parts: Path, tmp_path: Path) -> None:
    (parts / "chat.py").write_text(CHAT)
    words = settings(parts, tmp_path, "chat", *GRPO, f"agent.fn={parts}/chat.py:episode")
    assert main(["train", *words]) == 0
    run = tmp_path / "chat"
    # float32 on both sides, other kernels and another order of sums: as for plain completions.
    assert 0 < max(steps(run, "rollout_corr/log_prob_gap_max").values()) < 1e-4
    assert max(abs(kl) for kl in steps(run, "actor/first_ppo_kl").values()) < 1e-8
    samples = lines(run / "samples.jsonl")
    assert len(samples) == 3 * 4 * 4
    for sample in samples:
        assert sample["num_turns"] == 2 and len(sample["turn_rewards"]) == 2
        assert sample["reward"] == pytest.approx(sum(sample["turn_rewards"]))
        assert sample["num_rows"] == 2 - int(sample["prompt"][0]) % 2
        assert sample["completion"].startswith(f"<user>{sample['prompt']}<eos><assistant>")
        assert [said["role"] for said in sample["messages"]][:2] == ["user", "assistant"]
        assert sample["messages"][0]["text"] == sample["prompt"]
    for kept in lines(run / "tokens.jsonl"):
        rows = ["".join(part.get("text") or "".join(part["pieces"]) for part in row) for row in kept["rows"]]
        assert all("pieces" in row[-1] and "text" in row[0] for row in kept["rows"])
        texts = [s["completion"] for s in samples if (s["step"], s["uid"]) == (kept["step"], kept["uid"])]
        assert any(all(row in text for row in rows) for text in texts)
    assert set(steps(run, "agent/turns/mean").values()) == set(steps(run, "agent/turns/max").values()) == {2.0}
    rows = sum(sample["num_rows"] for sample in samples) / len(samples)
    assert sum(steps(run, "agent/branches").values()) / 3 == pytest.approx(rows)
    assert sum(steps(run, "agent/errors").values()) == sum(steps(run, "agent/timeouts").values()) == 0
    summary = json.loads((run / "summary.json").read_text())
    assert 0 <= summary["score_after"] <= 2, "the evaluation runs episodes, too"


@pytest.mark.slow
def test_every_token_of_episodes_that_run_ahead_is_trained_once(parts: Path, tmp_path: Path) -> None:
    """Pushes come in the middle of episodes, and of answers: these consist of pieces."""
    (parts / "endpoint.py").write_text(ENDPOINT)
    log = tmp_path / "tokens.jsonl"
    more = ["rollout.ahead=2", "rollout.num_servers=2", "rollout.piece_tokens=2", "trainer.total_training_steps=6"]
    more += [f"agent.fn={parts}/endpoint.py:episode", f"agent.args={{log:{log}}}", "trainer.val_before_train=false"]
    assert main(["train", *settings(parts, tmp_path, "ahead", *GRPO, *more)]) == 0
    run = tmp_path / "ahead"
    samples = lines(run / "samples.jsonl")
    written = sorted([uid, num] for uid, num in lines(log) if not uid.startswith("eval"))
    assert len(samples) == 6 * 4 * 4
    assert written == sorted([sample["uid"], sample["num_tokens"]] for sample in samples)
    spans = [sample["versions"] for sample in samples]
    assert max(len(each) for each in spans) > 1, "no episode saw a push"
    assert all(each[-1][2] == sample["num_tokens"] for each, sample in zip(spans, samples, strict=True))
    assert max(steps(run, "off_policy/version_lag/max").values()) >= 1  # less than 2 where servers are the slower ones
    assert all(grad > 0 for grad in steps(run, "actor/grad_norm").values())
