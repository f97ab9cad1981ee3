"""A run from a shell: all its processes get the signals of a scheduler, and its console shows text of rows and rewards.

No terminal obeys such a text, and it forges no line.  The runs are real processes whose console writes ASCII alone, as
with LC_ALL=C or in many pods.
"""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from ring_cases import make_parts, settings, steps
from strikes import lives

from megarl.metrics.reading.jsonl import append_lines

pytestmark = pytest.mark.dist

STRIKE = "\x1b]0;struck\x07\x1b[2J\x9b31m\r\u202e\u2028"
FORGED = "step 400/400  score 1.000"
HOSTILE = f"{STRIKE}\n{FORGED}\n<img src=x onerror=y> `|&"
OBEYED = re.compile(rb"[\x00-\x09\x0b-\x1f\x7f-\xff]")  # in ASCII

REWARD = f"""
import sys

def score(prompt, completion):
    print({HOSTILE!r}, file=sys.stderr)
    if prompt.extra.get("level") == "fails":
        raise ValueError({HOSTILE!r})
    return {{"score": len(completion.text) / 6, "acc": 1.0}}
"""


def run(*words: object, **variables: str) -> tuple[int, bytes]:
    """The exit code of `megarl`, and all that it writes to a console."""
    ascii_alone = {"PYTHONIOENCODING": "ascii"} if not variables else {}
    environment = {**os.environ, **ascii_alone, **variables}
    command = [sys.executable, "-m", "megarl", *map(str, words)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment, timeout=600)
    return done.returncode, done.stdout


def check(shown: bytes) -> None:
    found = OBEYED.search(shown)
    assert found is None, shown[max(found.start() - 200, 0) : found.end() + 50]
    assert not re.search(rf"^\s*{re.escape(FORGED)}".encode(), shown, re.M), shown


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_parts(tmp_path_factory.mktemp("parts"))
    (folder / "reward.py").write_text(REWARD)
    for name in ("train", "test"):
        rows = [json.loads(line) for line in (folder / f"data/{name}.jsonl").read_text().splitlines()]
        rows = [{**row, "ground_truth": HOSTILE} for row in rows[:20]]
        (folder / f"data/{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
def finished(parts: Path) -> tuple[Path, bytes]:
    """The folder and the console of a run whose processes all get signals, and which goes on then."""
    more = ["algorithm.adv_estimator=grpo", "trainer.total_training_steps=3", "trainer.n_gpus_per_node=1"]
    more += ["trainer.check_export=false", f"reward.fn={parts}/reward.py:score"]
    plan = [(1, "update_actor", "SIGUSR1"), (2, "gen", "SIGTERM"), (2, "update_actor", "SIGTERM")]
    words = settings(parts, parts / "runs", "done", *more)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONIOENCODING", "ascii")
        patch.chdir(parts)
        assert lives("train", words, plan, parts / "strikes.json", parts / "log") == [143, 0]
    return parts / "runs" / "done", (parts / "log").read_bytes()


@pytest.mark.full
def test_signal_tree_a_run_whose_processes_all_get_a_signal_saves_and_goes_on(
    finished: tuple[Path, bytes], parts: Path
) -> None:
    """As a scheduler sends it: to the driver, the fork server, ranks, the server, the collector and reward workers."""
    folder, shown = finished
    assert b"SIGUSR1: step 1 is saved" in shown
    assert b"SIGTERM: step 2 is finished, step 2 is saved; the same command goes on from there" in shown
    assert b"ended with exit code" not in shown, "nothing died"
    assert sorted(steps(folder, "actor/pg_loss")) == [1, 2, 3]
    for lost in ("rollout/collector_restarts", "rollout/lost", "push/servers_died"):
        assert set(steps(folder, lost).values()) == {0.0}, lost
    deadline = time.monotonic() + 30  # the kernel ends them when their parent has ended
    while left := [p.info["cmdline"] for p in psutil.process_iter(["cwd", "cmdline"]) if p.info["cwd"] == str(parts)]:
        assert time.monotonic() < deadline, left


@pytest.mark.full
def test_terminal_text_of_a_run_is_obeyed_by_no_terminal(finished: tuple[Path, bytes]) -> None:
    folder, shown = finished
    check(shown)
    assert b"answers before and after" in shown and rb"\u2713" in shown, "a sign that ASCII has not"
    page = (folder / "answers.md").read_text()
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e\u2028]|<img|[^\\\\]`", page) and "&lt;img" in page
    assert "<br>step 4" in page and (folder / "summary.json").is_file()


@pytest.mark.full
def test_terminal_text_of_a_runs_folder_is_not_either(finished: tuple[Path, bytes]) -> None:
    folder, _ = finished
    append_lines(folder / "advice.jsonl", [{"step": 1, "advice": HOSTILE}])
    for words in (("doctor", "--run", folder), ("watch", folder), ("report", folder), ("checkpoint", "list", folder)):
        code, shown = run(*words)
        assert code in (0, 2) and shown, words
        check(shown)
    (folder / "summary.json").unlink()
    status = json.loads((folder / "status.json").read_text())
    end = {"time": status["since"], "error": "RuntimeError", "why": HOSTILE}
    (folder / "status.json").write_text(json.dumps(status | {"end": end}))
    code, shown = run("doctor", "--run", folder)
    assert code == 1 and b"cause: " in shown
    check(shown)


@pytest.mark.full
def test_terminal_text_of_a_reward_and_of_a_row_that_are_refused_is_not_either(parts: Path) -> None:
    data = parts / "fails.jsonl"
    data.write_text(json.dumps({"prompt": "12+34=", "ground_truth": HOSTILE, "level": "fails"}))
    words = settings(parts, parts / "runs", "refused", f"data.train_files=[{data}]", "trainer.check_only=true")
    code, shown = run("train", *words, f"reward.fn={parts}/reward.py:score")
    assert code == 2 and b" it failed: " in shown
    check(shown)
    data.write_text(json.dumps({"prompt": "12+34=", "ground_truth": "46", "data_source": HOSTILE}))
    code, shown = run("train", *words)
    assert code == 2 and b"fails.jsonl:1: data_source='" in shown and b"expected printable characters" in shown
    check(shown)
    code, shown = run("train", *words, f"trainer.experiment_name='{HOSTILE}'")
    assert code == 2
    check(shown)


def test_terminal_text_in_a_locale_of_ascii_is_no_mistake_of_the_settings(parts: Path) -> None:
    ascii_alone = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    code, shown = run("config", "recipe=quickstart", "trainer.project_name='gr\u00fc\u00df'", **ascii_alone)
    assert code == 0 and rb"project_name: gr\xfc\xdf" in shown, shown[-2000:]
    check(shown)
