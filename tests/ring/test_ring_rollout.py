"""Whole small runs that prefetch, and whole small runs with agents: every token that servers wrote is learnt once.

What becomes of visits and episodes when such a run is killed is in test_exact_resume.py.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from ring_cases import CHAT, PPO, lines, steps
from strikes import weights
from trace_receiver import receiver

pytestmark = [pytest.mark.dist, pytest.mark.full]
Trained = Callable[..., Path]


def trained_by(run: Path) -> list[int]:
    return [visit for row in lines(run / "visits.jsonl") for visit in row["trained"]]


def test_what_runs_ahead_in_order_and_drains_is_the_same_to_the_bit(trained: Trained) -> None:
    """On two groups of ranks at once: the critic has a layout of its own."""
    more = """rollout.ahead=2 rollout.order=prompts rollout.update=drain rollout.num_servers=2 rollout.piece_tokens=2
        critic.megatron.tensor_model_parallel_size=1 trainer.total_training_steps=6 trainer.test_freq=-1"""
    first, second = (trained(name, *PPO, more) for name in ("first", "second"))
    assert (first / "logs" / "ranks_0").is_dir() and (first / "logs" / "ranks_1").is_dir()
    assert trained_by(first) == trained_by(second) == list(range(24))
    for metric in ("critic/score/mean", "actor/pg_loss", "actor/grad_norm", "off_policy/version_lag/max"):
        assert steps(first, metric) == steps(second, metric), metric
    assert max(steps(first, "off_policy/version_lag/max").values()) == 2
    assert weights(first) == weights(second)
    for sample in lines(first / "samples.jsonl"):
        assert len({version for version, _, _ in sample["versions"]}) == 1, "no completion sees two versions"


def test_on_shared_gpus_a_completion_may_last_several_turns(trained: Trained) -> None:
    """A turn ends when an iteration is finished; what other completions have by then is kept, with its version."""
    more = """rollout.placement=shared rollout.turn_s=0.01 rollout.max_running_requests=8 data.max_response_length=48
        trainer.total_training_steps=5 trainer.test_freq=-1"""
    run = trained("turns", *PPO, more)
    assert sorted(trained_by(run)) == list(range(20))
    spans = [sample["versions"] for sample in lines(run / "samples.jsonl")]
    assert all(each[0][1] == 0 and each[-1][2] > 0 for each in spans)
    assert max(len(each) for each in spans) > 1, "no completion lasted two turns"
    wasted = steps(run, "rollout/tokens_wasted_share")
    assert max(wasted.values()) == 0


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


AGENTS = "algorithm.adv_estimator=grpo agent.max_tokens=80 trainer.test_freq=-1"


def test_ranks_learn_the_turns_of_episodes_as_the_servers_wrote_them(parts: Path, trained: Trained) -> None:
    (parts / "chat.py").write_text(CHAT)
    run = trained("chat", AGENTS, f"trainer.n_gpus_per_node=1 agent.fn={parts}/chat.py:episode")
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


def test_every_token_of_episodes_that_run_ahead_is_trained_once(
    parts: Path, trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pushes come in the middle of episodes, and of answers: these consist of pieces.  The ranks are FSDP's.

    OpenTelemetry gets what each process did.
    """
    (parts / "endpoint.py").write_text(ENDPOINT)
    log = tmp_path / "tokens.jsonl"
    with receiver() as (endpoint, traced):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
        run = trained(
            "ahead",
            f"""{AGENTS} agent.fn={parts}/endpoint.py:episode agent.args={{log:{log}}} rollout.ahead=2
            rollout.num_servers=2 rollout.piece_tokens=2 trainer.total_training_steps=6 trainer.val_before_train=false
            actor.strategy=fsdp""",
        )
    samples = lines(run / "samples.jsonl")
    written = sorted([uid, num] for uid, num in lines(log) if not uid.startswith("eval"))
    assert len(samples) == 6 * 4 * 4
    assert written == sorted([sample["uid"], sample["num_tokens"]] for sample in samples)
    spans = [sample["versions"] for sample in samples]
    assert max(len(each) for each in spans) > 1, "no episode saw a push"
    assert all(each[-1][2] == sample["num_tokens"] for each, sample in zip(spans, samples, strict=True))
    assert max(steps(run, "off_policy/version_lag/max").values()) >= 1  # less than 2 where servers are the slower ones
    assert all(grad > 0 for grad in steps(run, "actor/grad_norm").values())

    roots = {span.name: span for span in traced if span.name.startswith("step ")}
    assert len(roots) == 6
    by_id = {span.span_id: span for span in traced}
    parent_of = {span.span_id: by_id.get(span.parent_span_id) for span in traced}
    names = {(span.name, parent.name) for span in traced if (parent := parent_of[span.span_id]) is not None}
    wanted = {("gen", "step 1"), ("update actor", "update_actor"), ("update actor: rank 1", "update actor")}
    assert wanted | {("episode", "group"), ("generate", "episode"), ("group", "step 1")} <= names, names
    lost = [span.name for span in traced if span.parent_span_id and parent_of[span.span_id] is None]
    assert set(lost) <= {"group"}, "only groups of the step that the run did not make"
