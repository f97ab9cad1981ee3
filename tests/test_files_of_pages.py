"""Files and commands of the README, of the book and of the loss layer's page, saved and run as a reader would."""

import asyncio
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from agent_endpoint import Scripted, endpoint_of
from config_helpers import BASE, tables_kept
from gsm8k_shaped import ASK
from readme_blocks import BOOK, ROOT, Command, blocks, commands, files
from report_cases import run_folder

from megarl import cli
from megarl.agents.chat import Chat
from megarl.agents.load import load_episode
from megarl.algo import ActorLoss, estimate, load_plugins, step_columns
from megarl.config import load_config
from megarl.data.examples.tiny import tiny_tokenizer
from megarl.data.prompts import Prompts, RowSettings
from megarl.rewards import REWARDS, load_reward
from megarl.rewards.result import to_result
from megarl.samples.batch import Batch
from megarl.samples.sample import Completion, Prompt, VersionSpan
from megarl.trainer.algorithm import make_algorithm

ALGO = blocks((ROOT / "megarl/algo/README.md").read_text())
ALGO_FILES = {block.file: block.text for block in ALGO if block.file}
ALGO_COMMANDS = [shlex.split(block.text.replace("\\\n", " "))[1:] for block in ALGO if block.language == "bash"]
TUTORIAL = {block.file: block.text for block in blocks(BOOK["tutorial.md"]) if block.file}


@pytest.fixture(autouse=True)
def desk() -> Iterator[None]:
    """The files of all pages; the quickstart is done, and what plug-ins register is gone afterwards."""
    for name, text in (files() | ALGO_FILES).items():
        Path(name).write_text(text)
    Path("train.yaml").write_text((ROOT / "megarl/commands/tasks/project/train.yaml").read_text())  # of `megarl new`
    Path("runs/quickstart/checkpoints/step_00000040").mkdir(parents=True)
    Path("examples").symlink_to(ROOT / "examples")
    with tables_kept():
        yield


def read(file: str) -> list[Prompt]:
    return Prompts(file, tiny_tokenizer(), RowSettings(256, shuffle=False)).all()


def tokens(rows: list[list[float]]) -> torch.Tensor:
    """A column of sequences that begin with a masked token."""
    return torch.tensor([number for row in rows for number in (0.0, *row)])


def batch_of(old_log_probs: list[list[float]], **rows: torch.Tensor) -> Batch:
    old = tokens(old_log_probs)
    columns = {"response_mask": tokens([[1.0] * len(row) for row in old_log_probs]), "old_log_probs": old}
    lengths = torch.tensor([1 + len(row) for row in old_log_probs])
    return Batch(torch.zeros(len(old), dtype=torch.int64), lengths, columns, rows)


def test_the_lines_of_pandas_draw_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("runs/quickstart").rename("runs/before")
    run_folder(Path("runs/quickstart"))
    monkeypatch.setenv("MPLBACKEND", "Agg")
    drawn: dict[str, Any] = {}
    exec(compile(files()["plot.py"], "plot.py", "exec"), drawn)
    assert len(drawn["training"]) == 40 and len(drawn["held_out"]) == 2
    assert [line.get_xdata().tolist() for line in drawn["axes"].lines][1] == [0, 40]
    assert Path("score.png").stat().st_size > 1000


# ---- data and configurations


def test_every_row_shape_of_the_page_is_read() -> None:
    text, messages, gsm8k, verl = read("my_data.jsonl")
    assert [prompt.ground_truth for prompt in (text, messages, gsm8k, verl)] == ["46"] * 4
    assert (text.text, text.data_source) == ("12+34=", "sums")
    assert [message["role"] for message in messages.text] == ["system", "user"]
    assert gsm8k.text == [{"role": "user", "content": "Ann has 12 pens and buys 34. How many?"}]
    assert verl.extra["extra_info"] == {"level": 2}


def test_the_gsm8k_download_writes_what_the_recipe_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    rows = [{"question": "Ann has 12 pens and buys 34. How many?", "answer": "12 + 34 = 46\n#### 1,046"}]
    monkeypatch.setattr(datasets, "load_dataset", lambda name, part, split: datasets.Dataset.from_list(rows))
    exec(compile(files()["get_gsm8k.py"], "get_gsm8k.py", "exec"), {})
    config, _ = load_config(["recipe=gsm8k_qwen2_5_0_5b_1gpu"])
    asked = f"{rows[0]['question']} {ASK}"  # for the answer after the mark, which alone the recipe's reward pays for
    assert config.reward.fn == ["gsm8k_strict"]
    for file in [*config.data.train_files, *config.data.val_files]:
        (prompt,) = read(file)
        assert (prompt.text, prompt.ground_truth) == ([{"role": "user", "content": asked}], "1046")


def test_the_users_file_of_the_page_lies_over_its_recipe() -> None:
    config, _ = load_config(["recipe=my_run.yaml"])
    assert config.algorithm.adv_estimator == "grpo"
    assert config.reward.fn == ["my_reward.py:short_and_right"]
    assert config.data.train_files == ["my_data.jsonl"]


@pytest.mark.parametrize("command", commands(), ids=lambda command: " ".join(command.words)[:60])
def test_every_command_composes_without_a_warning_or_is_refused_as_shown(
    command: Command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(cli, "_work_of", lambda _: lambda *given: seen.append(given[-1]) or 0)
    monkeypatch.setattr(cli, "missing_files", lambda config: [])  # some are written by scripts of the page
    monkeypatch.setenv("MEGARL_TOKEN", "0" * 64)
    code = cli.main(list(command.words))
    assert (code, capsys.readouterr().err) == ((2, f"{command.error}\n") if command.error else (0, ""))
    assert len(seen) == (command.error is None and "--help" not in command.words)


@pytest.mark.parametrize("words", ALGO_COMMANDS, ids=list(ALGO_FILES))
def test_the_commands_of_the_loss_layer_s_page_are_a_method(words: list[str]) -> None:
    command, *overrides = words
    assert command == "train"
    config, warnings = load_config([*BASE, *overrides])
    assert not warnings
    load_plugins(config.algorithm.plugins)
    assert make_algorithm(config).actor.loss.policy_loss == config.algorithm.policy_loss_fn
    assert set(config.reward.fn) <= set(REWARDS)


# ---- rewards


@pytest.mark.parametrize(
    ("name", "answer", "score", "extra"),
    [
        ("my_reward.py:short_and_right", " 46", 1.0, {"right": 1.0}),
        ("my_reward.py:short_and_right", "it must be 46", -0.03, {"right": 0.0}),
        ("cites_a_number.py:cites_a_number", "12 + 34 = 46", 1.0, {"right": 1.0, "characters": 12.0}),
        ("cites_a_number.py:cites_a_number", "46", 0.5, {"right": 1.0, "characters": 2.0}),
        ("cites_a_number.py:cites_a_number", "12 + 34 = 47", 0.0, {"right": 0.0, "characters": 12.0}),
        ("cites_a_number.py:cites_a_number", "", 0.0, {"right": 0.0, "characters": 0.0}),
        ("cites_a_number.py:cites_a_number", "46 or 4", 0.0, {"right": 0.0, "characters": 7.0}),
        ("reward_of_slime.py:reward", " 46", 1.0, None),
        ("reward_of_slime.py:reward", "47", 0.0, None),
        ("reward_of_trl.py:reward", " 46", 1.0, None),
        ("reward_of_trl.py:reward", "47", 0.0, None),
        ("brief", " 46", 0.98, {"right": 1.0}),
    ],
)
def test_a_reward_by_hand(name: str, answer: str, score: float, extra: dict[str, float] | None) -> None:
    load_plugins(["my_losses.py"])  # which registers "brief"
    reward: Any = load_reward(name)
    prompt = Prompt("1", [1], "12+34=", ground_truth="46", data_source="sums", extra={"level": 2})
    said = reward(prompt, Completion([1, 2], [0.0, 0.0], "stop", (VersionSpan(0, 0, 2),), answer))
    found = to_result(asyncio.run(said) if asyncio.iscoroutine(said) else said)
    assert found.reward == pytest.approx(score)
    assert extra is None or found.extra == extra


# ---- losses and estimators


@pytest.mark.parametrize(
    ("file", "loss", "new", "expected", "gradient", "stat"),
    [
        # ratios e^0.5, cut to 1.3, and e^-0.5
        (
            "my_loss.py",
            {"policy_loss": "my_cispo", "clip_high": 0.3},
            (-0.5, -1.5),
            lambda up, down: -1.3 * 2 * -0.5 - down * -1.5,
            lambda up, down: (-1.3 * 2, -down),
            "actor/cut",
        ),
        (
            "penalised_ratio.py",
            {"policy_loss": "penalised_ratio", "args": {"strength": 0.4}},
            (-0.5, -1.1),
            lambda up, down: (-2 * up + 0.2 * 0.25) + (-down + 0.2 * 0.01),
            lambda up, down: (-2 * up + 0.4 * 0.5, -down + 0.4 * -0.1),
            "actor/moved_far",
        ),
    ],
    ids=["my_loss", "penalised_ratio"],
)
def test_a_loss_by_hand(file: str, loss: Any, new: Any, expected: Any, gradient: Any, stat: str) -> None:
    """Two sequences of a trainable token, with advantages 2 and 1 and old log-probs of -1."""
    load_plugins([file])
    batch = batch_of([[-1.0], [-1.0]])
    batch = batch.with_columns(weight=batch.columns["response_mask"] / 2, advantages=tokens([[2.0], [1.0]]))
    log_probs = tokens([[number] for number in new]).requires_grad_()
    ratios = (torch.tensor(new) + 1).exp().tolist()
    out = ActorLoss(**loss)(batch, {"log_probs": log_probs})
    assert out.loss.item() == pytest.approx(expected(*ratios) / 2)
    assert out.stats[stat].result() == 0.5
    out.loss.backward()
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == pytest.approx(tokens([[part / 2] for part in gradient(*ratios)]).tolist())


@pytest.mark.parametrize(
    ("file", "name", "advantages"),
    [
        # 1 - (0 + 0.5)/2, 0 - (1 + 0.5)/2, 0.5 - (1 + 0)/2, and nobody to compare with
        ("my_estimator.py", "leave_one_out", [0.75, -0.75, 0, 3.0]),
        ("median_baseline.py", "median_baseline", [0.5, -0.5, 0, 0]),
    ],
)
def test_an_estimator_by_hand(file: str, name: str, advantages: list[float]) -> None:
    load_plugins([file])
    scores, group = torch.tensor([1.0, 0.0, 0.5, 3.0]), torch.tensor([0, 0, 0, 1])
    batch, _ = estimate(batch_of([[0.0]] * 4, score=scores, group=group), adv_estimator=name)
    assert batch.columns["advantages"].tolist() == pytest.approx(tokens([[each] for each in advantages]).tolist())
    assert batch.columns["returns"].tolist() == pytest.approx(tokens([[each] for each in scores.tolist()]).tolist())


def example() -> Batch:
    """Two samples of 1 + 2 and 1 + 1 tokens."""
    return batch_of([[-1.0, -2.0], [-3.0]], score=torch.tensor([1.0, 0.0]), group=torch.tensor([0, 1]))


def test_the_file_of_the_loss_layer_s_page_computes_what_it_says() -> None:
    load_plugins(["my_losses.py"])
    batch, _ = estimate(example(), adv_estimator="batch_mean", adv_estimator_args={"scale": 2.0})
    assert batch.columns["advantages"].tolist() == [0.0, 1.0, 1.0, 0.0, -1.0]
    assert batch.columns["returns"].tolist() == [0.0, 1.0, 1.0, 0.0, 0.0]
    loss = ActorLoss("spring", args={"strength": 0.3}, use_kl_loss=True, kl_loss_coef=2.0, kl_loss_type="root")
    log_probs = tokens([[-1.5, -2.0], [-3.0]]).requires_grad_()
    batch = batch.with_columns(ref_log_probs=batch.columns["old_log_probs"])
    found = loss(step_columns(batch, loss=loss, agg_mode="token-sum"), {"log_probs": log_probs})
    policy = 0.15 * 0.25 - torch.tensor(-0.5).exp().item() - 1 + 1
    assert found.loss.item() == pytest.approx(policy + 2 * (1.25**0.5 - 1))
    assert found.stats["actor/spring"].result() == pytest.approx(0.25 / 3)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_the_documented_loss_of_the_page_is_ppo_without_dual_clip(mode: str) -> None:
    load_plugins(["my_documented_loss.py"])
    batch = example().with_columns(advantages=tokens([[1.0, -2.0], [3.0]]))
    values = []
    for loss in (ActorLoss("documented_clip", args={"epsilon": 0.2}), ActorLoss("ppo", clip_c="off")):
        log_probs = tokens([[-0.5, -1.5], [-3.1]]).requires_grad_()
        loss(step_columns(batch, loss=loss, agg_mode=mode), {"log_probs": log_probs}).loss.backward()
        values.append(log_probs.grad)
    torch.testing.assert_close(*values)


def test_the_pages_keep_it_short() -> None:
    shown = files()
    assert len(shown["my_reward.py"].splitlines()) <= 5 and len(shown["my_loss.py"].splitlines()) <= 10
    functions = ALGO_FILES["my_losses.py"].split("\n\n\n")[1:]
    assert all(len(text.strip().splitlines()) <= 7 for text in functions)


# ---- environments and projects


def call(number: int) -> str:
    return f'<tool_call>{{"name": "add", "arguments": {{"number": {number}}}}}</tool_call>'


@pytest.mark.parametrize(
    ("texts", "score"),
    [
        ([call(9), call(3), "Done."], 0.9),
        ([call(12), call(6), call(6), "Done."], 0.9),  # the first is refused, and read by the model
        ([call(9), "Done."], 0.0),
    ],
)
def test_the_environment_runs_as_in_a_run(texts: list[str], score: float) -> None:
    function = load_episode("tools:reach_the_target.py:ReachTheTarget", {})

    async def episode() -> tuple[Any, str]:
        async with endpoint_of(Scripted("qwen2_5", texts), style="qwen2_5") as (endpoint, (bodies,)):
            session = endpoint.open("0-0/0")
            chat = Chat(session, [{"role": "user", "content": "Count!"}])
            found = await function.call(chat=chat, prompt=Prompt("0-0", [1], "Count!", "12"))
            return found, session.policy.text(bodies[-1]["input_ids"])

    found, seen = asyncio.run(episode())
    assert found == pytest.approx(score)
    assert "Count! Bring the counter to 12." in seen and "Adds a number to the counter." in seen
    assert ("a number from 1 to 9, please" in seen) == (call(12) in texts)


def test_a_program_of_the_page_posts_its_reward() -> None:
    async def posted() -> float | None:
        async with endpoint_of(Scripted("qwen2_5", ["yes"]), style="qwen2_5") as (endpoint, _):
            session = endpoint.open("0-0/0")
            where = {"OPENAI_BASE_URL": endpoint.url_of(session) + "/v1", "OPENAI_API_KEY": session.key}
            command = [sys.executable, "-c", "from post_reward import post_reward; post_reward(0.75)"]
            process = await asyncio.create_subprocess_exec(*command, env=os.environ | where)
            assert await process.wait() == 0
            return session.reward

    assert asyncio.run(posted()) == 0.75


def test_what_the_tutorial_puts_into_a_project_passes_its_tests() -> None:
    """The whole page is typed in tests/test_tutorial_page.py."""
    assert TUTORIAL.keys() == {"slower.yaml", "reward.py", "test_reward.py", "task.py"}
    assert cli.main(["new", "mine", "--task", "spell_backward"]) == 0
    for name, text in TUTORIAL.items():
        Path("mine", name).write_text(text)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd="mine", capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 passed" in done.stdout
