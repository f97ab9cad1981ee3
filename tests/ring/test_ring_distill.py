"""Teachers through the whole of the ring: on ranks of other layouts, behind a server, as reward, for agents."""

import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Event

import psutil
import pytest
from programs import runs
from ring_cases import make_parts, steps

from megarl.data.examples.sizes import TinySizes
from megarl.data.examples.tiny import write_tiny_model

pytestmark = [pytest.mark.dist, pytest.mark.full]
Trained = Callable[..., Path]

ALONE = """algorithm.adv_estimator=none trainer.test_freq=-1 trainer.val_before_train=false actor.ppo_epochs=4
    actor.optim.lr=1e-2 trainer.total_training_steps=5"""
ROUTE = """
def by_first_digit(prompt):
    return "odd" if int(prompt.text[0]) % 2 else "even"
"""
CHAT = """
async def episode(chat, prompt):
    messages = chat.messages
    first = await chat(messages)
    changed = [{"role": "assistant", "content": "?"}, {"role": "user", "content": "again"}]
    await chat([*messages, *changed])
    chat.reward(1.0)
"""


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two teachers: one with more layers, one with another hidden size and more padding in its vocabulary.

    Each teaches two of four prompts, which are those of every step: so divergences of two steps compare.  The policy's
    logits are as far apart as theirs, so that adapters under a frozen head can move it.
    """
    folder = make_parts(tmp_path_factory.mktemp("parts"), initializer_range=0.3)
    odd = TinySizes(hidden=32, layers=4, heads=4, kv_heads=2, head_dim=8, ffn=64)
    write_tiny_model(folder / "odd", odd, seed=5, initializer_range=0.3)
    write_tiny_model(folder / "even", replace(odd, hidden=48, layers=2), seed=6, initializer_range=0.3, tied=False)
    file = folder / "data/train.jsonl"
    rows = file.read_text().splitlines(keepends=True)
    kept = [[row for row in rows if int(json.loads(row)["prompt"][0]) % 2 == odd][:2] for odd in (0, 1)]
    file.write_text("".join(sum(kept, [])))
    (folder / "route.py").write_text(ROUTE)
    (folder / "chat.py").write_text(CHAT)
    return folder


@pytest.fixture
def teachers(parts: Path) -> str:
    paths = [f"teachers.{name}.model.path={parts}/{name}" for name in ("odd", "even")]
    return " ".join([*paths, f"distill.route={parts}/route.py:by_first_digit"])


def check_learning(run: Path, *names: str) -> None:
    for name in names:
        found = list(steps(run, f"distill/{name}/divergence").values())
        assert found[-1] < 0.9 * found[0], name
    assert all(grad > 0 for grad in steps(run, "actor/grad_norm").values())
    assert set(steps(run, "actor/pg_loss").values()) == {0.0}, "no advantage but the teachers'"


def test_two_teachers_of_other_layouts_than_the_policy_s_teach_its_adapters(trained: Trained, teachers: str) -> None:
    run = trained(
        "two",
        f"""{ALONE} {teachers} actor.megatron.tensor_model_parallel_size=2 actor.lora.rank=4
        teachers.odd.megatron.tensor_model_parallel_size=1 teachers.odd.megatron.pipeline_model_parallel_size=2
        teachers.even.megatron.tensor_model_parallel_size=1 distill.divergence=jsd distill.beta=0.3 distill.coef=10
        distill.end_coef=5 distill.decay_style=linear""",
    )
    check_learning(run, "odd", "even")
    assert list(steps(run, "distill/coef").values()) == pytest.approx([10, 9, 8, 7, 6])
    shares = zip(steps(run, "distill/odd/share").values(), steps(run, "distill/even/share").values(), strict=True)
    assert all(odd + even == pytest.approx(1) for odd, even in shares)


def end_server(run: Path, log: str, is_over: Event) -> list[psutil.Process]:
    """SIGKILL of the server with this log after the run's first step; returns it."""
    while not is_over.wait(0.05) and not ((run / "metrics.jsonl").exists() and 1 in steps(run, "actor/grad_norm")):
        pass
    servers = [child for child in psutil.Process().children(recursive=True) if runs(child, "megarl.hf_server.main")]
    found = [server for server in servers if log in os.readlink(f"/proc/{server.pid}/fd/1")]
    for process in found:
        process.kill()
    return found


def test_a_teacher_behind_a_server_of_the_run_and_one_on_ranks_by_their_likeliest_tokens(
    parts: Path, trained: Trained, teachers: str, tmp_path: Path
) -> None:
    """The server dies in the middle, and the iteration waits for the next one."""
    is_over = Event()
    with ThreadPoolExecutor(1) as beside:
        ended = beside.submit(end_server, tmp_path / "served", "/teacher_odd/", is_over)
        try:
            run = trained("served", ALONE, teachers, "teachers.odd.engine=server distill.top_k=20 rollout.ahead=1")
        finally:
            is_over.set()
        assert len(ended.result()) == 1
    check_learning(run, "odd", "even")
    assert (run / "logs/teacher_odd/server_0.log").exists()


def test_log_probs_as_reward_of_every_row_of_an_episode_that_runs_ahead(
    parts: Path, trained: Trained, teachers: str
) -> None:
    run = trained(
        "reward",
        f"""{teachers} algorithm.adv_estimator=grpo distill.form=reward distill.coef=0.1 actor.lora.rank=4
        rollout.ahead=1 trainer.test_freq=-1 agent.fn={parts}/chat.py:episode agent.max_tokens=80""",
    )
    for name in ("odd", "even"):
        assert all(gap < 0 for gap in steps(run, f"distill/{name}/log_prob_gap").values()), "another model's tokens"
    assert all(abs(mean) > 1e-3 for mean in steps(run, "critic/advantages/mean").values()), "grpo's own mean is 0"
    assert set(steps(run, "rows/mean").values()) == {2.0}
