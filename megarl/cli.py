"""The command line `megarl COMMAND [key=value ...]`: its commands, help pages and error messages.

Each wrong setting gives one sentence, and all of them exit code 2, never a traceback.  The module of a command is
imported only when the command runs, so that help is fast.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from difflib import get_close_matches
from functools import partial
from typing import NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megarl import __version__
from megarl.commands import checkpoint as saves
from megarl.commands import new as new_project
from megarl.commands.preload import preload_for
from megarl.commands.this_machine import placed
from megarl.config import Config, ConfigError, load_config, load_sweep, recipe_names, to_yaml, used_roles
from megarl.config.describe import Description, described
from megarl.config.validate.models import missing_folders
from megarl.config.verl import files
from megarl.convert import request as convert_request
from megarl.data.readers import missing
from megarl.doctor import request as doctor_request
from megarl.plan.command import request as plan_request
from megarl.processes.failure_report import write_report
from megarl.processes.garbage import imported
from megarl.processes.signals import EXIT_TERMINATED, Terminated
from megarl.report import request as report_request
from megarl.terminal import pages, sentences
from megarl.watch import request as watch_request


class Command(NamedTuple):
    """`module.function(config) -> exit code` runs the command; some take a request instead of a config."""

    module: str
    function: str
    about: str
    groups: tuple[str, ...] = ()  # of the keys that it reads
    examples: tuple[tuple[str, str], ...] = ()


_OF_TRAIN = (
    *("data", "model", "actor", "critic", "ref", "teachers", "distill"),
    *("rollout", "algorithm", "reward", "agent", "trainer"),
)
COMMANDS = {
    "train": Command(
        "megarl.train",
        "main",
        "reinforcement learning: rollouts, rewards, losses, weights, again",
        _OF_TRAIN,
        (
            ("megarl train recipe=quickstart", "a whole run on two CPU cores"),
            ("megarl train recipe=quickstart actor.optim.lr=1e-4", "the same with another learning rate"),
            ("megarl train -m recipe=quickstart actor.optim.lr=1e-4,3e-4", "a run of each value, a table at the end"),
            ("megarl train --config my_run.yaml", "your own file; it may say `recipe: NAME` to build on a shipped one"),
            ("megarl train recipe=grpo_qwen2_5_72b_8x8h100 trainer.check_only=true", "check the layout, start nothing"),
        ),
    ),
    "sft": Command(
        "megarl.trainer.sft",
        "main",
        "supervised training on prompts and responses, with the same engine",
        ("sft", "model", "actor", "trainer"),
        (("megarl sft model.path=path/to/hf_folder sft.train_files=[my_examples.jsonl]", "a cold start"),),
    ),
    "evaluate": Command(
        "megarl.trainer.evaluation.evaluate",
        "main",
        "answer the evaluation prompts with a model and score the answers",
        ("data", "model", "rollout", "reward", "agent", "trainer"),
        (("megarl evaluate recipe=quickstart model.path=runs/quickstart/hf", "the score of a folder"),),
    ),
    "node": Command(
        "megarl.commands.node",
        "main",
        "a further machine of a run; `train` and `sft` are it where node_rank > 0",
        ("trainer",),
        (("megarl node trainer.nnodes=2 trainer.node_rank=1 trainer.master_addr=10.0.0.1", "the second machine"),),
    ),
    "serve": Command(
        "megarl.commands.serve",
        "main",
        "the servers of rollout.urls that belong on this machine, or servers that join a run (rollout.join)",
        ("model", "rollout"),
        (
            ("megarl serve model.path=path/to/hf_folder rollout.urls=[http://127.0.0.1:30000]", "servers alone"),
            ("megarl serve recipe=NAME rollout.join=10.0.0.1:29400", "servers for a run that goes on"),
        ),
    ),
    "new": Command("megarl.commands.new", "main", "write a small project of a task, to be run and changed"),
    "convert": Command(
        "megarl.convert.convert", "main", "a model on disk, from Hugging Face's form to Megatron's or back"
    ),
    "checkpoint": Command("megarl.commands.checkpoint", "main", "verify, list or prune the saves of a run"),
    "report": Command("megarl.report.command", "main", "a page of a run's folder: curves, times, answers, settings"),
    "watch": Command("megarl.watch.command", "main", "a page in the terminal that shows what a run is doing"),
    "plan": Command("megarl.plan.command.command", "main", "memory and time of a run, predicted; better layouts"),
    "doctor": Command(
        "megarl.doctor.command",
        "main",
        "whether this machine has what a run needs; with --run, why a run stopped",
        ("rollout", "reward", "trainer"),
        (
            ("megarl doctor rollout.engine=sglang", "with SGLang's environment too"),
            ("megarl doctor --json", "one JSON object in place of a table"),
            ("megarl doctor --run runs/quickstart", "what a run's folder tells of its end, and what to do next"),
            ("megarl doctor --listen 10.0.0.1:29400", "wait for machines that measure the network to this one"),
            ("megarl doctor --peer 10.0.0.1:29400", "round trip and speed to the machine that waits there, too"),
        ),
    ),
    "config": Command(
        "megarl.cli",
        "print_config",
        "print the configuration that a command line comes to",
        (*_OF_TRAIN, "sft"),
        (
            ("megarl config recipe=quickstart", "every key of a run and its value"),
            ("megarl config --help actor.clip_ratio", "what a key means, its default and its range"),
        ),
    ),
}

# Commands that take a request of their own in place of a configuration: what parses it, and prints its help.
REQUESTS = {
    "new": new_project,
    "convert": convert_request,
    "checkpoint": saves,
    "report": report_request,
    "watch": watch_request,
}

CHECK = Command("megarl.trainer.checks.check", "main", "`trainer.check_only`: plug-ins, data, rewards and models")
EXPLAIN = Command("megarl.doctor.command", "explain_run", "`megarl doctor --run`: why a run stopped")
SWEEP = Command("megarl.commands.sweep", "main", "`megarl train -m`: a run of each combination of values")

OVER_NODES = ("train", "sft", "evaluate", "node")  # on all machines but the first, these run `node`
CHECKED = ("train", "sft", "evaluate")
WITH_SERVERS = ("train", "evaluate", "serve")

GROUPS = {
    "data": "files of prompts, batch size, lengths",
    "model": "the policy at the start: a Hugging Face folder or hub name",
    "actor": "its loss, optimizer and layout (actor.optim.*, actor.megatron.*)",
    "critic": "the same for the value model; follows the actor unless set, but for critic.optim.*",
    "ref": "the reference policy of the KL terms",
    "teachers": "models from which the policy learns, each with a name of its own (teachers.NAME.*)",
    "distill": "how it learns from them: a divergence as loss, or log-probs as reward",
    "rollout": "who writes the completions, and how they are sampled",
    "algorithm": "policy loss, advantages, KL in the reward, plug-ins",
    "reward": "what scores a completion",
    "agent": "episodes of several turns with tools, in place of plain completions",
    "trainer": "names, ranks, steps, checkpoints, trackers",
    "sft": "the supervised stage (megarl sft)",
}

EXAMPLES = (
    *COMMANDS["train"].examples[:4],
    *COMMANDS["config"].examples,
    ("megarl plan recipe=grpo_qwen2_5_72b_8x8h100 --search", "what it would take on its GPUs, and what is faster"),
    ("megarl train --help", "the page of a command"),
)

MULTIRUN = "train -m (--multirun): key=a,b or key=choice(a,b) or key=range(start,stop,step), one run after another."

FLAGS = {"-h": "--help", "-m": "--multirun"} | {name: name for name in ("--debug", "--help", "--multirun", "--version")}

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


def main(argv: list[str] | None = None) -> int:
    """Run one command line (default: the process's own) and return its exit code."""
    if argv is None:  # this is the process's own command line
        os.umask(0o077)  # what it and the processes that it starts write, others cannot read
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # SIGTERM ends it as Ctrl-C does, in order
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # a run that is not yet there, or not any more, has no use for it
    given = sys.argv[1:] if argv is None else argv
    flags, words = {FLAGS[word] for word in given if word in FLAGS}, [word for word in given if word not in FLAGS]
    if "--version" in flags:
        sentences().print(f"megarl {__version__}")
        return 0
    try:
        if "--help" in flags or not words:
            _help(words, pages(stderr="--help" not in flags, markup=True))
            return 0 if "--help" in flags else EXIT_USAGE
        return _run_several(words[0], words[1:]) if "--multirun" in flags else _run(words[0], words[1:])
    except KeyboardInterrupt:
        _complain("interrupted")
        return EXIT_INTERRUPTED
    except Terminated as end:
        _complain(str(end))
        return EXIT_TERMINATED
    except ValueError as error:
        if "--debug" in flags:
            raise
        for sentence in error.sentences if isinstance(error, ConfigError) else (error,):
            _complain(f"error: {sentence}")
        return EXIT_USAGE
    except OSError as error:  # a full disk, no permission
        if "--debug" in flags:
            raise
        _complain(f"error: {error}")
        return EXIT_FAILED


def print_config(config: Config) -> int:
    """`megarl config`: YAML on stdout, which `--config` accepts."""
    sentences().print(to_yaml(config), end="")
    return 0


def _run(name: str, words: list[str]) -> int:
    if name not in COMMANDS:
        raise ValueError(_no_command(name))
    if name in REQUESTS:
        request = REQUESTS[name].parse(words)  # before the imports of the command
        return _work_of(COMMANDS[name])(request)
    if name == "plan":
        request, settings = plan_request.parse(words)
        return _work_of(COMMANDS[name])(request, _overrides(settings))
    if name == "doctor":
        asked, settings = doctor_request.parse(words)
        if asked.run is not None:
            return _work_of(EXPLAIN)(asked)
        return _work_of(COMMANDS[name])(asked, _configured(name, settings))
    config = _configured(name, words)
    if config.trainer.check_only and name != "config":  # needs no other machine, and no GPU
        if name not in CHECKED:
            raise ValueError(
                f"trainer.check_only=true: `megarl {name}` has no check; expected one of {', '.join(CHECKED)}"
            )
        return _work_of(CHECK)(config, name)
    if name in OVER_NODES:
        config = placed(config, os.environ)
        name = "node" if config.trainer.node_rank else name
    preload_for(name, config)
    try:
        return _work_of(COMMANDS[name])(config)
    except (RuntimeError, FloatingPointError, OSError) as error:  # of ranks, servers, collector, push or a full disk
        return _stopped(config, error)


def _configured(name: str, words: list[str]) -> Config:
    """The configuration of a command, on this machine; warnings are printed, and how its engine was chosen."""
    said: list[str] = []
    config, warnings = load_config(_overrides(words), command=name, choose_engine=partial(_choose_engine, name, said))
    if name == "train" and not config.trainer.check_only and (faults := list(_missing_files(config))):
        raise ConfigError(*faults)
    for sentence in [*said, *(f"warning: {warning}" for warning in warnings)]:
        _complain(sentence)
    return config


def _missing_files(config: Config) -> Iterator[str]:
    """Of a run on one machine that makes no files itself."""
    data, trainer = config.data, config.trainer
    if trainer.num_machines == 1 and not trainer.prepare:
        yield from missing_folders(config, tuple(used_roles(config, "train")))
        yield from missing([*data.train_files, *data.val_files])


def _choose_engine(command: str, said: list[str], config: Config) -> str:
    """The engine for rollout.engine=auto; `said` gets the reason.  It stays auto where no server is started."""
    if command not in WITH_SERVERS:
        return config.rollout.engine
    if command in OVER_NODES and placed(config, os.environ).trainer.node_rank:  # the first machine decides
        return config.rollout.engine
    from megarl.trainer.servers.engine import chosen_engine  # with torch, which help does not need

    engine, reason = chosen_engine(config, command)
    if config.trainer.check_only and config.trainer.device != "cpu" and engine == "hf":
        said.append(f"rollout.engine=auto: checked as sglang, as on GPUs; on this machine it is hf, because {reason}")
        return config.rollout.engine
    said.append(f"rollout.engine=auto: {engine}, because {reason}")
    return engine


def _run_several(name: str, words: list[str]) -> int:
    """Run a sweep; all its configurations are checked before the first run starts."""
    if name != "train":
        raise ValueError(f"megarl {name} -m: only `megarl train` makes several runs, expected it without -m")
    return _work_of(SWEEP)(load_sweep(_overrides(words)))


def _stopped(config: Config, error: Exception) -> int:
    """Print one sentence, and write the traceback and the ranks' reports to logs/failure.txt of the run."""
    where = write_report(error, config.trainer.run_dir / "logs" / "failure.txt")
    is_saved = any((config.trainer.run_dir / "checkpoints").glob("step_*/manifest.json"))
    again = "goes on from the last checkpoint" if is_saved else "begins anew, as there is no checkpoint yet"
    _complain(f"the run stopped: {error}\n{where}; the same command {again}")
    return EXIT_FAILED


def _work_of(command: Command) -> Callable[..., int]:
    return getattr(imported(command.module), command.function)


def _overrides(words: list[str]) -> list[str]:
    """Replace `--config FILE` and `--config=FILE` by `recipe=FILE`, and write `--option value` of verl as one word."""
    out: list[str] = []
    rest = iter(words)
    for word in rest:
        option, equals, value = word.partition("=")
        if option not in ("--config", files.NAME, files.FOLDER):
            out.append(word)
            continue
        value = value if equals else next(rest, "")
        if option != "--config":
            out.append(f"{option}={value}")
            continue
        if not value.endswith((".yaml", ".yml")):
            raise ValueError(f"--config {value}: expected the path of a YAML file")
        quoted = value.replace("'", "\\'")
        out.append(f"recipe='{quoted}'")
    return out


def _complain(sentence: str) -> None:
    sentences(stderr=True).print(sentence)


def _help(words: list[str], console: Console) -> None:
    """Print the page of all commands, that of one command, or the descriptions of keys."""
    if not words:
        return _print_help(console)
    name, *keys = words
    if name not in COMMANDS:
        raise ValueError(_no_command(name))
    if name == "plan":
        return plan_request.OPTIONS.show(console)
    if name in REQUESTS:
        return REQUESTS[name].OPTIONS.show(console)
    if name != "config" or not keys:
        return _print_command(console, name, COMMANDS[name])
    for found in [found for key in keys for found in described(key)]:
        _print_key(console, found)


def _no_command(name: str) -> str:
    guess = get_close_matches(name, COMMANDS, n=1)
    hint = f"did you mean {guess[0]}?" if guess else f"expected one of {', '.join(COMMANDS)}"
    return f"there is no command {name}; {hint}"


def _print_help(console: Console) -> None:
    console.print("[bold]megarl[/] COMMAND \\[recipe=NAME | --config FILE] \\[key=value ...]")
    console.print("Reinforcement-learning post-training of language models with Megatron-Core and SGLang.\n")
    _print_table(console, "commands", [(name, command.about) for name, command in COMMANDS.items()])
    _print_table(console, "keys: GROUP.NAME=VALUE", list(GROUPS.items()))
    _print_table(console, "recipes", [(name, "") for name in recipe_names()])
    _print_table(console, "examples", list(EXAMPLES))
    console.print(
        "Keys of verl's documents are understood, with or without actor_rollout_ref. in front.\n"
        f"{MULTIRUN}\n"
        "--debug shows the traceback of an error, --version the version.",
        highlight=False,
    )


def _print_command(console: Console, name: str, command: Command) -> None:
    console.print(f"[bold]megarl {name}[/] \\[recipe=NAME | --config FILE] \\[key=value ...]")
    console.print(f"{command.about}\n")
    _print_table(console, "keys that it reads", [(group, GROUPS[group]) for group in command.groups])
    _print_table(console, "examples", list(command.examples))
    if name == "train":
        console.print(MULTIRUN)
    console.print("megarl config --help KEY explains a key.")


def _print_key(console: Console, found: Description) -> None:
    rows = [("meaning", found.meaning), ("type", found.kind), ("default", found.default), ("unit", found.unit)]
    rows += [("allowed", found.allowed), ("also accepted", ", ".join(found.spellings))]
    _print_table(console, found.key, [(name, text) for name, text in rows if text])


def _print_table(console: Console, title: str, rows: list[tuple[str, str]]) -> None:
    table = Table(title=title, title_justify="left", title_style="bold", show_header=False, box=None, padding=(0, 2))
    for name, about in rows:
        table.add_row(f"[cyan]{escape(name)}[/]", escape(about))
    console.print(table)
    console.print()
