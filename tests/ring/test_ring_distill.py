"""Teachers through the whole of the ring: on ranks of other layouts, behind a server, as reward, for agents."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import psutil
import pytest
from ring_cases import make_parts, settings, steps

from megarl.cli import main
from megarl.data.examples.tiny import write_tiny_model

pytestmark = [pytest.mark.dist, pytest.mark.slow]

ALONE = [
    "algorithm.adv_estimator=none",
    "trainer.test_freq=-1",
    "trainer.val_before_train=false",
    "actor.ppo_epochs=4",
    "actor.optim.lr=1e-2",
]
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
    shape = {"heads": 4, "kv_heads": 2, "head_dim": 8, "ffn": 64}
    write_tiny_model(folder / "odd", hidden=32, layers=4, seed=5, initializer_range=0.3, **shape)
    write_tiny_model(folder / "even", hidden=48, layers=2, seed=6, initializer_range=0.3, tied=False, **shape)
    file = folder / "data/train.jsonl"
    rows = file.read_text().splitlines(keepends=True)
    kept = [[row for row in rows if int(json.loads(row)["prompt"][0]) % 2 == odd][:2] for odd in (0, 1)]
    file.write_text("".join(sum(kept, [])))
    (folder / "route.py").write_text(ROUTE)
    (folder / "chat.py").write_text(CHAT)
    return folder


def teachers(parts: Path) -> list[str]:
    paths = [f"teachers.{name}.model.path={parts}/{name}" for name in ("odd", "even")]
    return [*paths, f"distill.route={parts}/route.py:by_first_digit"]


def test_a_data_source_of_no_prompt_is_refused_at_the_start(
    parts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [f"teachers.odd.model.path={parts}/odd", "teachers.odd.data_sources=[arithmtic]"]
    assert main(["train", *settings(parts, tmp_path, "misspelt", *ALONE, *words)]) != 0
    assert "no prompt of data.train_files has the data_source arithmtic" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "misspelt").exists()


def check_learning(run: Path, *names: str) -> None:
    for name in names:
        found = list(steps(run, f"distill/{name}/divergence").values())
        assert found[-1] < 0.9 * found[0], name
    assert all(grad > 0 for grad in steps(run, "actor/grad_norm").values())
    assert set(steps(run, "actor/pg_loss").values()) == {0.0}, "no advantage but the teachers'"


def test_two_teachers_of_other_layouts_than_the_policy_s_teach_its_adapters(parts: Path, tmp_path: Path) -> None:
    more = [
        *ALONE,
        *teachers(parts),
        "actor.megatron.tensor_model_parallel_size=2",
        "teachers.odd.megatron.tensor_model_parallel_size=1",
        "teachers.odd.megatron.pipeline_model_parallel_size=2",
        "teachers.even.megatron.tensor_model_parallel_size=1",
        "distill.divergence=jsd",
        "distill.beta=0.3",
        "distill.coef=10",
        "distill.end_coef=5",
        "distill.decay_style=linear",
        "actor.lora.rank=4",
        "trainer.total_training_steps=5",
    ]
    assert main(["train", *settings(parts, tmp_path, "two", *more)]) == 0
    run = tmp_path / "two"
    check_learning(run, "odd", "even")
    assert list(steps(run, "distill/coef").values()) == pytest.approx([10, 9, 8, 7, 6])
    shares = zip(steps(run, "distill/odd/share").values(), steps(run, "distill/even/share").values(), strict=True)
    assert all(odd + even == pytest.approx(1) for odd, even in shares)


def end_server(run: Path, folder: Path, is_over: Event) -> list[psutil.Process]:
    """SIGKILL of the server of this folder after the run's first step; returns it."""
    while not is_over.wait(0.05) and not ((run / "metrics.jsonl").exists() and 1 in steps(run, "actor/grad_norm")):
        pass
    found = [child for child in psutil.Process().children(recursive=True) if str(folder) in child.cmdline()]
    for process in found:
        process.kill()
    return found


def test_a_teacher_behind_a_server_of_the_run_and_one_on_ranks_by_their_likeliest_tokens(
    parts: Path, tmp_path: Path
) -> None:
    """The server dies in the middle, and the iteration waits for the next one."""
    more = [
        *ALONE,
        *teachers(parts),
        "teachers.odd.engine=server",
        "distill.top_k=20",
        "rollout.ahead=1",
        "trainer.total_training_steps=5",
    ]
    run = tmp_path / "served"
    is_over = Event()
    with ThreadPoolExecutor(1) as beside:
        ended = beside.submit(end_server, run, parts / "odd", is_over)
        try:
            assert main(["train", *settings(parts, tmp_path, "served", *more)]) == 0
        finally:
            is_over.set()
        assert len(ended.result()) == 1
    check_learning(run, "odd", "even")
    assert (run / "logs/teacher_odd/server_0.log").exists()


@pytest.mark.long
def test_log_probs_as_reward_beside_the_run_s_own_with_adapters(parts: Path, tmp_path: Path) -> None:
    more = [
        *teachers(parts),
        "algorithm.adv_estimator=grpo",
        "distill.form=reward",
        "distill.coef=0.1",
        "actor.lora.rank=4",
        "rollout.ahead=1",
        "trainer.test_freq=-1",
    ]
    assert main(["train", *settings(parts, tmp_path, "reward", *more)]) == 0
    run = tmp_path / "reward"
    for name in ("odd", "even"):
        assert all(gap < 0 for gap in steps(run, f"distill/{name}/log_prob_gap").values()), "another model's tokens"
    assert all(abs(mean) > 1e-3 for mean in steps(run, "critic/advantages/mean").values()), "grpo's own mean is 0"
    assert not steps(run, "distill/divergence")


@pytest.mark.long
def test_every_row_of_an_episode_is_taught_also_ahead(parts: Path, tmp_path: Path) -> None:
    more = [*ALONE, *teachers(parts), f"agent.fn={parts}/chat.py:episode", "agent.max_tokens=80", "rollout.ahead=1"]
    assert main(["train", *settings(parts, tmp_path, "chat", *more, "trainer.total_training_steps=4")]) == 0
    run = tmp_path / "chat"
    check_learning(run, "odd", "even")
    assert set(steps(run, "rows/mean").values()) == {2.0}
