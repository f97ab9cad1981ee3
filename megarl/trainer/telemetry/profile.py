"""Profiles of chosen steps: which ranks write them, and where."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from megarl.config.schema.trainer import Profile
from megarl.group import Group
from megarl.io.terminal import say
from megarl.metrics.computing.timer import Timer
from megarl.roles import messages

FOLDER = "profile"
UNDER_NSYS = "NSYS_PROFILING_SESSION_ID"  # a variable that Nsight Systems sets for what it starts


def check_profile(settings: Profile, num_steps: int, groups: Iterable[Group]) -> None:
    """Raises ValueError, before the models are loaded, for what the started ranks cannot profile."""
    if not settings.steps:
        return
    if beyond := [step for step in settings.steps if step > num_steps]:
        raise ValueError(
            f"trainer.profile.steps={settings.steps}: the run has {num_steps} steps, so there is no step {beyond[0]}"
        )
    for key, is_asked in (("tool=nvtx", settings.tool == "nvtx"), ("memory=true", settings.memory)):
        if is_asked and any(group.device_name == "cpu" for group in groups):
            raise ValueError(f"trainer.profile.{key}: the ranks have no GPU; expected trainer.profile.tool=torch alone")


@contextmanager
def profiled(settings: Profile, groups: Iterable[Group], run_dir: Path, step: int, timer: Timer) -> Iterator[None]:
    """Profile the calls of a step on the chosen ranks of each group; nothing is written if the block raises.

    Starting, stopping and writing is the stage "profile", outside of the step's own stages.
    """
    if step not in settings.steps:
        yield
        return
    if settings.tool == "nvtx" and UNDER_NSYS not in os.environ:
        what = "trainer.profile.tool=nvtx records nothing unless Nsight Systems starts the run:"
        say(what, nsys_line(settings), stderr=False)
    message = messages.Profile(tuple(settings.ranks), settings.tool, settings.memory, folder=None)
    started = list(groups)
    with timer("profile"):
        for group in started:
            group.call_each(message)
    yield
    with timer("profile"):
        for group in started:
            place = (run_dir / FOLDER / f"step_{step:08}" / group.name).absolute()
            for found in group.call_each(replace(message, folder=str(place))):
                for file in found["files"]:
                    say(f"profile of step {step}: {file}", stderr=False)


def nsys_line(settings: Profile) -> str:
    """The command that records this run with Nsight Systems: a report for each of the chosen steps."""
    options = "--trace=cuda,nvtx,osrt --trace-fork-before-exec=true --capture-range=cudaProfilerApi"
    repeats = f"--capture-range-end=repeat:{len(settings.steps)} --output=profile_%p"
    return f"nsys profile {options} {repeats} megarl {shlex.join(sys.argv[1:])}"
