"""A small run through the real parts, for tests: its settings, and what it left behind."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from megarl.cli import main
from megarl.data.examples.sizes import TinySizes
from megarl.data.examples.tasks import Sums, write_task
from megarl.data.examples.tiny import write_tiny_model

PPO = ["actor.megatron.tensor_model_parallel_size=2", "actor.use_kl_loss=true", "actor.ppo_mini_batch_size=2"]
SHAPE = TinySizes(hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, ffn=64)

# A tool counts digits.  Half of the episodes change what was said before, so that they have two rows.
CHAT = """
def digits(text):
    return sum(map(str.isdigit, text))

async def episode(chat, prompt):
    messages = chat.messages
    first = await chat(messages)
    said = first.message if int(prompt.text[0]) % 2 else {"role": "assistant", "content": "?"}
    asked = {"role": "user", "content": f"{digits(first.text)} digits"}
    second = await chat([*messages, said, asked])
    chat.reward(digits(first.text) / 6, first)
    chat.reward(digits(second.text) / 6, second)
"""


def make_parts(folder: Path, sizes: TinySizes = SHAPE, **settings: Any) -> Path:
    """A task and a tiny model, as a user would have them."""
    write_task(folder / "data", Sums(num_sft=0, num_test=20, low=10, high=29))
    write_tiny_model(folder / "model", sizes, **settings)
    # An untrained model solves nothing; this it can be scored for, so that advantages are not all 0.
    (folder / "digits.py").write_text(
        "def share_of_digits(prompt, completion):\n    return sum(map(str.isdigit, completion.text)) / 6\n"
    )
    return folder


def settings(parts: Path, runs: Path, name: str, *more: str) -> list[str]:
    """The words of a command line: four prompts of four completions a step, on two ranks."""
    return [
        f"data.train_files=[{parts}/data/train.jsonl]",
        f"data.val_files=[{parts}/data/test.jsonl]",
        "data.train_batch_size=4",
        "data.max_prompt_length=16",
        "data.max_response_length=6",
        f"model.path={parts}/model",
        f"reward.fn={parts}/digits.py:share_of_digits",
        "actor.optim.lr=1e-3",
        "rollout.n=4",
        "trainer.device=cpu",
        "trainer.n_gpus_per_node=2",
        "trainer.total_training_steps=3",
        f"trainer.default_local_dir={runs}",
        f"trainer.experiment_name={name}",
        *more,
    ]


def lines(file: Path) -> list[dict[str, Any]]:
    """The objects of a file that may still be written to: a last line without its end is left out."""
    return [json.loads(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]


def steps(run: Path, metric: str) -> dict[int, float]:
    return {row["step"]: row[metric] for row in lines(run / "metrics.jsonl") if metric in row}


def train_in_a_process(words: list[str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as out:
        return subprocess.Popen([sys.executable, "-m", "megarl", "train", *words], stdout=out, stderr=out)


def train_kill_resume(words: list[str], run: Path, step: int) -> int:
    """Start a run, end its driver by SIGKILL after `step`, and run it to its end; returns how many children it had."""
    process = train_in_a_process(words, run.with_suffix(".log"))
    wait_for_step(run, step, process)
    children = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(children, timeout=30)
    assert not alive, f"children outlived the driver: {alive}"
    assert main(["train", *words]) == 0
    return len(children)


def wait_for_step(run: Path, step: int, process: subprocess.Popen[bytes], limit_s: float = 600.0) -> None:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        assert process.poll() is None, "the run ended before it could be killed"
        if (run / "metrics.jsonl").exists() and step in steps(run, "actor/pg_loss"):
            return
        time.sleep(0.05)
    raise TimeoutError(f"step {step} did not come")
