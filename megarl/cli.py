"""The command line `megarl COMMAND [key=value ...]`: its commands, help pages and error messages.

Each wrong setting gives one sentence, and all of them exit code 2, never a traceback.  The module of a command is
imported only when the command runs, so that help is fast.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from difflib import get_close_matches
from functools import partial
from typing import NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megarl import __version__
from megarl.commands.preload import preload_for
from megarl.commands.this_machine import (
    OVER_NODES,
    TRAINS,
    choose_engine,
    missing_files,
    missing_packages,
    placed,
)
from megarl.config import Config, ConfigError, load_config, load_sweep, recipe_names, to_yaml
from megarl.config.describe import Description, described, records
from megarl.config.keys import group_helps
from megarl.config.names import SUPERVISED
from megarl.config.schema.record import BASIC
from megarl.io.callers import allow_all_files
from megarl.io.durable_files import named
from megarl.io.own_folders import RUN_FOLDER, check_own
from megarl.io.sockets import use_ports, use_private_network
from megarl.io.terminal import own_process, pages, say, sentences
from megarl.io.traces import obstacle
from megarl.plugins.options import settings_of
from megarl.processes.failure_report import write_report
from megarl.processes.garbage import imported
from megarl.processes.own_places import own_places
from megarl.processes.signals import EXIT_TERMINATED, Terminated
from megarl.trainer.run_lock import USERS_MASK


class Command(NamedTuple):
    """`module.function` gets the configuration, or the request that `parse(words)` of the module `parser` makes."""

    module: str
    about: str
    groups: tuple[str, ...] = ()  # of the keys that it reads
    examples: tuple[tuple[str, str], ...] = ()
    parser: str | None = None
    function: str = "main"


def _with_words(module: str, about: str) -> Command:
    """A command with words of its own, all of it in one module."""
    return Command(module, about, parser=module)


_OF_TRAIN = (
    *("data", "model", "actor", "critic", "ref", "teachers", "distill"),
    *("rollout", "algorithm", "reward", "agent", "trainer"),
)
QUICKSTART = "quickstart"
COMMANDS = {
    QUICKSTART: Command(
        "megarl.train",
        "`megarl train recipe=quickstart`: a tiny model learns to add, in about a minute on two CPU cores",
        _OF_TRAIN,
        (
            ("megarl quickstart", "in any folder; runs/quickstart there has the model, its numbers and a page"),
            ("megarl quickstart trainer.total_training_steps=4", "its first steps alone"),
        ),
    ),
    "train": Command(
        "megarl.train",
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
        "megarl.commands.sft",
        "supervised training on prompts and responses, with the same engine",
        ("sft", "model", "actor", "trainer"),
        (("megarl sft model.path=path/to/hf_folder sft.train_files=[my_examples.jsonl]", "a cold start"),),
    ),
    "rm": Command(
        "megarl.commands.sft",
        "a reward model from pairs of answers, of which one was chosen",
        ("sft", "model", "actor", "trainer"),
        (("megarl rm model.path=path/to/hf_folder sft.train_files=[my_pairs.jsonl]", "for reward.model.path"),),
        function="rm",
    ),
    "dpo": Command(
        "megarl.commands.sft",
        "the policy from such pairs, without a reward model (DPO, IPO)",
        ("sft", "dpo", "model", "actor", "trainer"),
        (("megarl dpo model.path=path/to/hf_folder sft.train_files=[my_pairs.jsonl] dpo.beta=0.1", "DPO"),),
        function="dpo",
    ),
    "evaluate": Command(
        "megarl.trainer.evaluation.command",
        "answer the evaluation prompts with a model and score the answers",
        ("data", "model", "rollout", "reward", "agent", "trainer"),
        (("megarl evaluate recipe=quickstart model.path=runs/quickstart/hf", "the score of a folder"),),
    ),
    "node": Command(
        "megarl.commands.node",
        "a further machine of a run; `train`, `sft`, `rm` and `dpo` are it where node_rank > 0",
        ("trainer",),
        (("megarl node recipe=NAME trainer.nnodes=2 trainer.node_rank=1 trainer.master_addr=10.0.0.1", "machine 1"),),
    ),
    "serve": Command(
        "megarl.commands.serve",
        "the servers of rollout.urls that belong on this machine, or servers that join a run (rollout.join)",
        ("model", "rollout"),
        (
            ("megarl serve model.path=path/to/hf_folder rollout.urls=[http://127.0.0.1:30000]", "servers alone"),
            ("megarl serve recipe=NAME rollout.join=10.0.0.1:29400", "servers for a run that goes on"),
        ),
    ),
    "new": _with_words("megarl.commands.new", "write a small project of a task, to be run and changed"),
    "convert": Command(
        "megarl.commands.convert.convert",
        "a model on disk, from Hugging Face's form to Megatron's or back",
        parser="megarl.commands.convert.request",
    ),
    "checkpoint": _with_words("megarl.commands.checkpoint", "verify, list or prune the saves of a run"),
    "report": _with_words("megarl.metrics.report.page", "a page of a run: curves, times, answers, settings"),
    "watch": _with_words("megarl.commands.watch.command", "a page in the terminal that shows what a run is doing"),
    "plan": _with_words("megarl.commands.plan.command", "memory and time of a run, predicted; better layouts"),
    "launch": _with_words("megarl.commands.launch.command", "the file that submits a run to a cluster, or submit it"),
    "doctor": Command(
        "megarl.commands.doctor.command",
        "whether this machine has what a run needs; with --run, why a run stopped",
        ("rollout", "reward", "trainer"),
        (
            ("megarl doctor rollout.engine=sglang", "with SGLang's environment too"),
            ("megarl doctor --json", "one JSON object in place of a table"),
            ("megarl doctor --run runs/quickstart", "why a run ended, by the files of its folder, and what to do next"),
            ("megarl doctor --listen 10.0.0.1:29400", "wait for machines that measure the network to this one"),
            ("megarl doctor --peer 10.0.0.1:29400", "round trip and speed to the machine that waits there, too"),
        ),
        parser="megarl.commands.doctor.command",
    ),
    "config": Command(
        "megarl.cli",
        "print the configuration that a command line comes to",
        (*_OF_TRAIN, "sft", "dpo"),
        (
            ("megarl config recipe=quickstart", "every key of a run and its value"),
            ("megarl config --help actor.clip_ratio", "what a key means, its default and its range"),
        ),
        function="print_config",
    ),
}

CHECK = Command("megarl.commands.check", "`trainer.check_only`")
SWEEP = Command("megarl.commands.sweep", "`megarl train -m`")

CHECKED = ("train", *SUPERVISED, "evaluate")

EXAMPLES = (
    *COMMANDS["train"].examples[:4],
    *COMMANDS["config"].examples,
    ("megarl plan recipe=grpo_qwen2_5_72b_8x8h100 --search", "what it would take on its GPUs, and what is faster"),
    ("megarl train --help", "the page of a command"),
)

MULTIRUN = "train -m (--multirun): key=a,b or key=choice(a,b) or key=range(start,stop,step), one run after another."

FLAGS = {"-h": "--help", "-m": "--multirun"} | {name: name for name in ("--debug", "--help", "--multirun", "--version")}

ON = "--on"  # ray: the machines are nodes of a Ray cluster
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


def main(argv: list[str] | None = None) -> int:
    """Run one command line (default: the process's own) and return its exit code."""
    if argv is None:  # this is the process's own command line
        own_process()
        # What it and the processes that it starts write, others cannot read.  The mask is that of the first command.
        os.environ.setdefault(USERS_MASK, f"{os.umask(0o077):o}")
        allow_all_files()
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # SIGTERM ends it as Ctrl-C does, in order
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # a run that is not yet there, or not any more, has no use for it
    given = sys.argv[1:] if argv is None else argv
    flags, words = {FLAGS[word] for word in given if word in FLAGS}, [word for word in given if word not in FLAGS]
    if "--version" in flags:
        sentences().print(f"megarl {__version__}")
        return 0
    try:
        if words and words[0] not in COMMANDS:
            raise ValueError(_no_command(words[0]))
        if "--help" in flags or not words:
            _help(words, pages(stderr="--help" not in flags, markup=True))
            return 0 if "--help" in flags else EXIT_USAGE
        return _run_several(words[0], words[1:]) if "--multirun" in flags else _run(words[0], words[1:])
    except KeyboardInterrupt:
        say("interrupted")
        return EXIT_INTERRUPTED
    except Terminated as end:
        say(end)
        return EXIT_TERMINATED
    except (ValueError, OSError, MemoryError) as error:
        if "--debug" in flags:
            raise
        is_mistake = isinstance(error, ValueError) and not isinstance(error, UnicodeError)  # not a full disk, no place
        say(*(f"error: {why}" for why in (error.sentences if isinstance(error, ConfigError) else [_words_of(error)])))
        return EXIT_USAGE if is_mistake else EXIT_FAILED


def print_config(config: Config) -> int:
    """`megarl config`: YAML on stdout, which `--config` accepts."""
    sentences().print(to_yaml(config), end="")
    return 0


def _run(name: str, words: list[str]) -> int:
    if name == QUICKSTART:
        name, words = "train", [f"recipe={QUICKSTART}", *words]
    if ON in words:
        at = words.index(ON)
        engine, words = words[at + 1 : at + 2], words[:at] + words[at + 2 :]
        if name not in CHECKED or engine != ["ray"]:
            raise ValueError(f"megarl {name} {ON} {' '.join(engine)}: expected `megarl {CHECKED[0]} {ON} ray ...`")
        config, _ = load_config(settings_of(words), command=name)
        if not config.trainer.check_only:
            return int(imported("megarl.commands.on_ray").main(name, settings_of(words), config))
    if parser := COMMANDS[name].parser:
        request = imported(parser).parse(words)  # before the imports of the command
        return _work_of(COMMANDS[name])(request)
    config = _configured(name, words)
    if name == "config":
        return _work_of(COMMANDS[name])(config)
    if name in OVER_NODES and not config.trainer.trust_shared_folders:
        check_own(config.trainer.run_dir, RUN_FOLDER)
    with own_places():
        return _run_program(name, config)


def _run_program(name: str, config: Config) -> int:
    if config.trainer.check_only:  # needs no other machine, and no GPU
        if name not in CHECKED:
            raise ValueError(
                f"trainer.check_only=true: `megarl {name}` has no check; expected one of {', '.join(CHECKED)}"
            )
        return _work_of(CHECK)(config, name)
    if name in OVER_NODES:
        config = placed(config, os.environ)
        name = "node" if config.trainer.node_rank else name
    if name in TRAINS and (faults := list(missing_packages(config))):
        raise ConfigError(*faults)
    use_ports(config.trainer.ports)
    use_private_network(config.trainer.private_network)
    preload_for(name, config)
    try:
        with named(config.trainer.run_dir):
            return _work_of(COMMANDS[name])(config)
    except (RuntimeError, FloatingPointError, OSError, MemoryError, UnicodeError) as error:  # of ranks, servers, disk
        return _stopped(config, error)


def _configured(name: str, words: list[str]) -> Config:
    """The configuration of a command, on this machine; warnings are printed, and how its engine was chosen."""
    reasons: list[str] = []
    choose = partial(choose_engine, name, reasons)
    config, warnings = load_config(settings_of(words), command=name, choose_engine=choose)
    if name == "train" and not config.trainer.check_only and (faults := list(missing_files(config))):
        raise ConfigError(*faults)
    if name in CHECKED and (sentence := obstacle(os.environ)):
        warnings = [*warnings, sentence]
    for sentence in [*reasons, *(f"warning: {warning}" for warning in warnings)]:
        say(sentence)
    return config


def _run_several(name: str, words: list[str]) -> int:
    """Run a sweep; all its configurations are checked before the first run starts."""
    if name != "train":
        raise ValueError(f"megarl {name} -m: only `megarl train` makes several runs, expected it without -m")
    runs = load_sweep(settings_of(words))
    for run in runs:
        if not run.config.trainer.check_only:
            placed(run.config, os.environ)  # refuses a sweep on each of several machines
    return _work_of(SWEEP)(runs)


def _stopped(config: Config, error: Exception) -> int:
    """Print one sentence, and write the traceback and the ranks' reports to logs/failure.txt of the run."""
    where = write_report(error, config.trainer.run_dir / "logs" / "failure.txt")
    is_saved = any((config.trainer.run_dir / "checkpoints").glob("step_*/manifest.json"))
    again = "goes on from the last checkpoint" if is_saved else "begins anew, as there is no checkpoint yet"
    say(f"the run stopped: {_words_of(error)}", f"{where}; the same command {again}")
    return EXIT_FAILED


def _work_of(command: Command) -> Callable[..., int]:
    return getattr(imported(command.module), command.function)


def _words_of(error: Exception) -> str:
    return str(error) or f"no memory is left ({type(error).__name__})"


def _help(words: list[str], console: Console) -> None:
    """Print the page of all commands, that of one command, or the descriptions of keys."""
    if not words:
        return _print_help(console)
    name, *keys = words
    if (parser := COMMANDS[name].parser) and not COMMANDS[name].groups:
        return imported(parser).OPTIONS.show(console)
    if name != "config" or not keys:
        return _print_command(console, name, COMMANDS[name])
    for key in [key for name in keys for key in described(name)]:
        _print_key(console, key)


def _no_command(name: str) -> str:
    guess = get_close_matches(name, COMMANDS, n=1)
    hint = f"did you mean {guess[0]}?" if guess else f"expected one of {', '.join(COMMANDS)}"
    return f"there is no command {name}; {hint}"


def _print_help(console: Console) -> None:
    console.print("[bold]megarl[/] COMMAND \\[recipe=NAME | --config FILE] \\[key=value ...]")
    console.print("Reinforcement-learning post-training of language models with Megatron-Core and SGLang.\n")
    _print_table(console, "commands", [(name, command.about) for name, command in COMMANDS.items()])
    _print_basic(console)
    _print_table(console, "recipes", [(name, "") for name in recipe_names()])
    _print_table(console, "examples", list(EXAMPLES))
    console.print(
        "Keys of verl's documents are understood, with or without actor_rollout_ref. in front.\n"
        f"{MULTIRUN}\n"
        "--debug shows the traceback of an error, --version the version.",
        highlight=False,
    )


def _print_command(console: Console, name: str, command: Command) -> None:
    recipe = "" if name == QUICKSTART else "\\[recipe=NAME | --config FILE] "
    console.print(f"[bold]megarl {name}[/] {recipe}\\[key=value ...]")
    console.print(f"{command.about}\n")
    _print_table(console, "keys that it reads", [(group, group_helps()[group]) for group in command.groups])
    _print_table(console, "examples", list(command.examples))
    if name == "config":
        _print_basic(console)
    if name == "train":
        console.print(MULTIRUN)
    console.print("megarl config --help KEY explains a key, and --help WORD all keys with this word.")


def _print_basic(console: Console) -> None:
    basic = [(name, keys[0]) for _, name, keys in records() if keys[0].level == BASIC]
    rows = [(name, f"{first.meaning} ({first.default})") for name, first in basic]
    _print_table(console, "basic keys, KEY=VALUE (docs/configuration.md has all)", rows)


def _print_key(console: Console, key: Description) -> None:
    rows = [("meaning", key.meaning), ("type", key.kind), ("default", key.default), ("unit", key.unit)]
    rows += [("allowed", key.allowed), ("acts only if", key.only_if), ("read by", key.commands)]
    rows += [("also accepted", ", ".join(key.spellings)), ("level", key.level)]
    _print_table(console, key.key, [(name, text) for name, text in rows if text])


def _print_table(console: Console, title: str, rows: list[tuple[str, str]]) -> None:
    table = Table(title=title, title_justify="left", title_style="bold", show_header=False, box=None, padding=(0, 2))
    for name, about in rows:
        table.add_row(f"[cyan]{escape(name)}[/]", escape(about))
    console.print(table)
    console.print()
