"""The commands that train as calls of Python, for notebooks: rows and rewards are objects, results are data frames.

    from megarl.notebook import train

    run = train("path/to/hf_folder", rows, reward, {"actor.optim.lr": 3e-5, "trainer.total_training_steps": 8})
    run.metrics["critic/score/mean"].plot()

A call is `megarl train` in a process of its own, with the same settings and checks.  Its rows and rewards stand in
`inputs/` of the run's folder: from a terminal `megarl train --config FOLDER/config.yaml` goes on with the run.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

import yaml

from megarl.cli import EXIT_USAGE
from megarl.commands.watch.page import Run as Watched
from megarl.commands.watch.page import page
from megarl.config import ConfigError, preset_names
from megarl.config.settings import flat
from megarl.io.durable_files import PRIVATE_FOLDER
from megarl.io.terminal import pages
from megarl.metrics.reading.jsonl import ANSWERS, METRICS, SAMPLES, read_lines
from megarl.metrics.report.page import write_report
from megarl.processes.lifetime import die_with_parent

if TYPE_CHECKING:  # slow to import
    from pandas import DataFrame

Rows = Sequence[Mapping[str, Any]]
Reward = str | Callable[..., Any]
LOOK_S = 1.0  # between two pictures of a run
WIDTH = 110  # characters of a picture
KEPT = 4  # last lines of a command that failed, in its error
ERROR, STEP, SCORES = "error: ", "step ", ("val/", "val-core/", "accuracy ")  # begin lines of a command
TERMINALS = ("FORCE_COLOR", "CLICOLOR_FORCE")  # a kernel sets them, whose cells show no moving lines of a command
_REWARDS = '''"""The rewards of a run, as its notebook had them when it began.

The functions with all values that they use are in rewards.pkl, SHA-256 {digest}.
"""

import sys
from pathlib import Path

import cloudpickle

sys.path += [place for place in {path} if place not in sys.path]
[{names}] = cloudpickle.loads(Path(__file__).with_suffix(".pkl").read_bytes())
'''


class Run:
    """A run by its folder, also one that a terminal has started: Run("runs/quickstart").

    Raises ValueError for a folder of something else.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).expanduser()
        if not (self.folder / "config.yaml").is_file():
            raise ValueError(f"{folder}: no config.yaml there; expected the folder of a run, such as runs/train_1")

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r})"

    @property
    def model(self) -> Path:
        """The trained model as a Hugging Face folder, which another call takes."""
        return self.folder / "hf"

    @property
    def summary(self) -> dict[str, Any]:
        """Score and accuracy before and after, seconds, and more, as docs/outputs.md has them; {} before its end."""
        file = self.folder / "summary.json"
        return dict(json.loads(file.read_text())) if file.exists() else {}

    @property
    def metrics(self) -> DataFrame:
        """A row for each step and a column for each metric, NaN where a step has none: not each has an evaluation."""
        return _frame(self.folder / METRICS).drop(columns="kind", errors="ignore").groupby("step").last()

    @property
    def samples(self) -> DataFrame:
        """A row for each answer of samples.jsonl: step, prompt, completion, ground_truth, reward and more."""
        return _frame(self.folder / SAMPLES)

    def evaluate(self, prompts: Sequence[str] | Rows, settings: Mapping[str, Any] | None = None) -> DataFrame:
        """A row for each answer of the trained model: `megarl evaluate` with the run's settings.

        Rows get rewards, as in the run.  A list of texts has no right answers, and what answers it no reward.
        Raises ValueError for a reward model, which answers nothing, and as `train` does.
        """
        config = self.model / "config.json"
        if not config.is_file() or "ForSequenceClassification" in config.read_text():
            raise ValueError(f"{self.model}: no model that answers is there; expected a finished run of a policy")
        call = _Call("evaluate", self.folder)
        texts = isinstance(prompts, list | tuple) and all(isinstance(prompt, str) for prompt in prompts)
        rows: Rows | Sequence[str] = [{"prompt": prompt} for prompt in prompts] if texts else prompts
        given: dict[str, Any] = {"recipe": str(self.folder / "config.yaml"), "model.path": str(self.model)}
        if texts:
            given |= {"reward.fn": call.rewards(_unscored), "reward.audit": None}
            given |= {"reward.weights": {}, "reward.by_data_source": {}}
        said = call.execute(given | call.data("data.val_files", rows), settings, is_scored=not texts)
        answers = _frame(Path(said[-1].removeprefix("results: ")) / ANSWERS)
        return answers.drop(columns=["reward", "reward_extra"]) if texts else answers

    def report(self) -> Any:
        """Write report.html; returns its path, in a notebook as a frame that shows it."""
        path = write_report(self.folder)
        if not _in_notebook():
            return path
        from IPython.display import IFrame

        return IFrame(os.path.relpath(path), width="100%", height=700)


def train(
    model: str | Path,
    rows: Rows,
    reward: Reward | Sequence[Reward] = "auto",
    settings: Mapping[str, Any] | None = None,
    *,
    held_out: Rows = (),
    folder: str | Path | None = None,
) -> Run:
    """Reinforcement learning: `megarl train`.

    model: a Hugging Face folder, or the name of a preset.  rows: as lines of data.train_files, such as {"prompt": ...,
    "ground_truth": ...}; held_out: those of the evaluations.  reward: a function as docs/data_rewards_plugins.md has
    it, of the notebook or of a module, or what reward.fn takes; or several of them.  settings: by key, such as
    {"actor.optim.lr": 1e-6}; "recipe" names what they build on.  folder: of the run; unless set the next free one of
    runs/train_1, runs/train_2, ...  With the folder of a run that stopped, the same call goes on with it.

    Raises ConfigError, a sentence for each mistake; RuntimeError if the run failed.  An interrupt ends the run.
    """
    with _call("train", folder) as call:
        given = call.data("data.train_files", rows) | call.held_out("data.val_files", held_out)
        call.execute(given | call.model(model) | {"reward.fn": call.rewards(reward)}, settings)
        return call.run


def sft(
    model: str | Path,
    rows: Rows,
    settings: Mapping[str, Any] | None = None,
    *,
    held_out: Rows = (),
    folder: str | Path | None = None,
) -> Run:
    """Supervised training on {"prompt": ..., "response": ...}: `megarl sft`; the rest as for `train`."""
    return _supervised("sft", model, rows, settings, held_out, folder)


def rm(
    model: str | Path,
    rows: Rows,
    settings: Mapping[str, Any] | None = None,
    *,
    held_out: Rows = (),
    folder: str | Path | None = None,
) -> Run:
    """A reward model from {"prompt": ..., "chosen": ..., "rejected": ...}: `megarl rm`; the rest as for `train`."""
    return _supervised("rm", model, rows, settings, held_out, folder)


def dpo(
    model: str | Path,
    rows: Rows,
    settings: Mapping[str, Any] | None = None,
    *,
    held_out: Rows = (),
    folder: str | Path | None = None,
) -> Run:
    """DPO or IPO on such pairs: `megarl dpo`; the rest as for `train`."""
    return _supervised("dpo", model, rows, settings, held_out, folder)


def _supervised(
    command: str,
    model: str | Path,
    rows: Rows,
    settings: Mapping[str, Any] | None,
    held_out: Rows,
    folder: str | Path | None,
) -> Run:
    with _call(command, folder) as call:
        given = call.data("sft.train_files", rows) | call.held_out("sft.val_files", held_out)
        call.execute(given | call.model(model), settings)
        return call.run


@contextmanager
def _call(command: str, folder: str | Path | None) -> Iterator[_Call]:
    """A call whose run is new, where no folder is given: that is removed if no run begins in it."""
    call = _Call(command, folder if folder is not None else _new_folder(command))
    try:
        yield call
    finally:
        if folder is None and not (call.folder / "config.yaml").exists():
            shutil.rmtree(call.folder)


class _Call:
    """A command with what it is given, in files of its run's folder.

    Their folders have the names of what they hold, so nothing that an earlier call of the run has given changes.
    """

    def __init__(self, command: str, folder: str | Path) -> None:
        self._command, self.folder = command, Path(folder).expanduser()

    @property
    def run(self) -> Run:
        return Run(self.folder)

    def data(self, key: str, rows: Rows | Sequence[str]) -> dict[str, Any]:
        """The key of a file with these rows."""
        name = key.rpartition(".")[2]
        return {key: [self._write(f"{name}.jsonl", "".join(map(_line, _rows(name, rows))).encode())]}

    def held_out(self, key: str, rows: Rows) -> dict[str, Any]:
        """The same; nothing without any."""
        return {} if isinstance(rows, tuple) and not rows else self.data(key, rows)

    def model(self, model: str | Path) -> dict[str, Any]:
        """The keys of a folder, or of a preset."""
        is_preset = model in preset_names() and not Path(model).exists()
        return {"model" if is_preset else "model.path": str(model)}

    def rewards(self, given: Reward | Sequence[Reward]) -> list[str]:
        """What reward.fn takes.  Functions of the notebook are kept by value, those of a module by its name."""
        rewards = [given] if isinstance(given, str) or callable(given) else list(given or ())
        if not all(isinstance(one, str) or callable(one) for one in rewards) or not rewards:
            raise ConfigError(f"reward={given!r}: expected a function, a name as reward.fn takes it, or a list of both")
        functions = [one for one in rewards if not isinstance(one, str)]
        own = [getattr(one, "__name__", "") for one in functions]  # metrics and errors show these names
        names = [one if one.isidentifier() and own.count(one) == 1 else f"reward_{at}" for at, one in enumerate(own)]
        if functions:
            import cloudpickle  # only needed here

            try:
                values = cloudpickle.dumps(functions)
            except Exception as error:  # of whatever a function holds
                raise ConfigError(f"reward: {', '.join(names)} cannot be kept for the run: {error}") from error
            places = [place for place in sys.path if not place.startswith((sys.prefix, sys.base_prefix, "__"))]
            text = _REWARDS.format(digest=_digest(values), path=places, names=", ".join(names))
            text += "".join(map(_source, functions))
            file = self._write("rewards.py", text.encode())
            Path(file).with_suffix(".pkl").write_bytes(values)
        addresses = (f"{file}:{name}" for name in names)
        return [one if isinstance(one, str) else next(addresses) for one in rewards]

    def execute(
        self, arguments: Mapping[str, Any], settings: Mapping[str, Any] | None, *, is_scored: bool = True
    ) -> list[str]:
        """Run the command; returns its lines.  `is_scored`: else its scores mean nothing.  Raises as `train` does."""
        folder = self.folder.resolve()
        place = {"trainer.default_local_dir": str(folder.parent), "trainer.experiment_name": folder.name}
        own = dict(flat(settings or {}))
        if twice := sorted(own.keys() & (arguments.keys() | place.keys() | {"trainer.check_only"})):
            raise ConfigError(*(f"settings: {key} belongs to the call itself; expected others" for key in twice))
        given = {**arguments, **place, **own}
        if Path(str(given.get("recipe", ""))).is_file():  # in a file it would be looked for from that file's folder
            given["recipe"] = str(Path(given["recipe"]).resolve())
        text = yaml.safe_dump(json.loads(json.dumps(given, default=str)), sort_keys=False)
        file = self._write(f"{self._command}.yaml", text.encode())
        draws = _in_notebook() and self._command != "evaluate"
        hidden = (ERROR,) + (STEP,) * draws + SCORES * (not is_scored)
        return _run([self._command, "--config", file], hidden, Picture(self.folder) if draws else None)

    def _write(self, name: str, content: bytes) -> str:
        file = self.folder / "inputs" / _digest(content)[:8] / name
        for folder in [*reversed(file.parents)]:
            folder.mkdir(PRIVATE_FOLDER, exist_ok=True)  # `parents=True` would make those above with other rights
        file.write_bytes(content)
        return str(file)


def _new_folder(command: str) -> Path:
    """The next folder below runs/ that nobody has, which is made."""
    for number in count(1):
        folder = Path(f"runs/{command}_{number}")
        try:
            folder.mkdir(PRIVATE_FOLDER, parents=True)
        except FileExistsError:
            continue
        return folder
    raise AssertionError("there is always a next number")


def _rows(name: str, rows: Any) -> list[dict[str, Any]]:
    """Rows as dictionaries, of a list, a data frame, or a data set.

    Raises ConfigError for none, and for a row of another kind, with its number.
    """
    rows = rows.to_dict("records") if hasattr(rows, "iterrows") else rows
    if isinstance(rows, str | Mapping) or not hasattr(rows, "__iter__"):
        raise ConfigError(f"{name}: a {type(rows).__name__}; expected a list of rows")
    found = list(rows)
    if not found:
        raise ConfigError(f"{name}: there is no row; expected at least one")
    for at, row in enumerate(found):
        if not isinstance(row, Mapping):
            raise ConfigError(f"{name}[{at}]: a {type(row).__name__}; expected a dictionary")
        try:
            _line(row).encode()
        except (AttributeError, TypeError, ValueError) as error:
            raise ConfigError(f"{name}[{at}]: it cannot be written as JSON: {error}") from error
    return [dict(row) for row in found]


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(row, ensure_ascii=False, default=lambda value: value.tolist()) + "\n"  # numpy and torch have it


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _unscored(prompt: object, completion: object, ground_truth: object = None) -> float:  # noqa: ARG001
    return 0.0


class Picture:
    """What a run is doing, as `megarl watch` shows it, in a place of the notebook's cell."""

    def __init__(self, folder: Path) -> None:
        from IPython.display import display

        self._run, self._console = Watched(folder), pages()
        self._console.width = WIDTH
        self._shown = display({"text/plain": "starting"}, raw=True, display_id=True)

    def draw(self, *, is_running: bool) -> None:
        self._run.look()
        with self._console.capture() as text:
            self._console.print(page(self._run, is_running=is_running))
        self._shown.update({"text/plain": text.get()}, raw=True)


def _run(words: Sequence[str], hidden: tuple[str, ...], picture: Picture | None) -> list[str]:
    """Run `megarl` with these words, and print its lines but those that begin so; returns all.  Raises as `train`."""
    parent = os.getpid()
    process = subprocess.Popen(
        [sys.executable, "-m", "megarl", *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={name: value for name, value in os.environ.items() if name not in TERMINALS},
        process_group=0,  # an interrupt reaches it once: from here
        preexec_fn=partial(die_with_parent, parent, heeds_signals=True),
    )
    lines = SimpleQueue[str | None]()
    threading.Thread(target=_read, args=(process, lines), daemon=True).start()
    said: list[str] = []
    try:
        while (line := _next(lines, picture)) is not None:
            said.append(line)
            if not line.startswith(hidden):
                print(line)
    except BaseException:
        process.send_signal(signal.SIGINT)
        raise
    finally:
        try:
            code = process.wait()
        except KeyboardInterrupt:  # a second one does not wait
            process.kill()
            raise
        if picture:
            picture.draw(is_running=False)
    if code == EXIT_USAGE:
        raise ConfigError(*(line.removeprefix(ERROR) for line in said if line.startswith(ERROR)))
    if code:
        raise RuntimeError(f"megarl {words[0]} ended with exit code {code}: {' '.join(said[-KEPT:])}")
    return said


def _read(process: subprocess.Popen[str], lines: SimpleQueue[str | None]) -> None:
    """Hand on its lines, and None at their end."""
    assert process.stdout is not None, "it is a pipe"
    for line in process.stdout:
        lines.put(line.rstrip("\n"))
    lines.put(None)


def _next(lines: SimpleQueue[str | None], picture: Picture | None) -> str | None:
    """The next line; the picture is drawn while there is none."""
    while True:
        try:
            return lines.get(timeout=LOOK_S)
        except Empty:
            if picture:
                picture.draw(is_running=True)


def _source(function: Callable[..., Any]) -> str:
    """The function as a comment, for readers and for `megarl report`, which compares these files; "" if unknown."""
    try:
        return "\n" + textwrap.indent(inspect.getsource(function), "# ")
    except (OSError, TypeError):
        return ""


def _in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


def _frame(file: Path) -> DataFrame:
    """The lines of a file as rows.  Raises ValueError if the run has no such file."""
    from pandas import DataFrame

    if not file.is_file():
        raise ValueError(f"{file}: the run has no such file, or not yet")
    return DataFrame(read_lines(file))
