"""`megarl checkpoint verify|list|prune FOLDER`: looks after the saves of a run, without torch.

FOLDER is a run's folder, its `checkpoints/`, one save in it, or a folder of Hugging Face's form with SHA256SUMS.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import NamedTuple

from rich.filesize import decimal
from rich.table import Table

from megarl.config import read_yaml
from megarl.io.durable_files import SUMS, Unreadable, faults_of_sums
from megarl.io.terminal import pages, say
from megarl.plugins.options import Options, count, folder, number
from megarl.trainer.checkpoint.checkpoint import (
    MANIFEST,
    Damaged,
    Retention,
    faults_in,
    folders_under,
    forget,
    forget_left,
    read_manifest,
    read_scores,
    step_of,
)
from megarl.trainer.run_lock import owned

EXIT_DAMAGED = 2


class Request(NamedTuple):
    verb: str
    folder: Path
    keep: dict[str, int]  # fields of a Retention that are given
    dry_run: bool = False


def parse(words: Sequence[str]) -> Request:
    """Raises ValueError, one sentence, for words that are no request."""
    given = OPTIONS.values(words)
    keep = {name: number for name in ("newest", "every", "best") if (number := given[name]) is not None}
    if given["verb"] != "prune" and (keep or given["dry_run"]):
        OPTIONS.error(f"{given['verb']}: keep=, every=, best= and --dry-run belong to prune")
    return Request(given["verb"], given["folder"], keep, given["dry_run"])


def main(request: Request) -> int:
    """0: done, and whole; 2: something is damaged.  Raises ValueError for a folder without saves."""
    return VERBS[request.verb](request)


def verify(request: Request) -> int:
    """Read every file of all saves and compare size and SHA-256 with the manifest; name what is damaged."""
    folder = request.folder
    if (folder / SUMS).is_file():
        faults = {folder: faults_of_sums(folder)}
    else:
        faults = {save: _faults(save, reads=True) for save in _saves(folder)}
    for save, found in faults.items():
        _say(f"{save}: {'whole' if not found else f'{len(found)} damaged'}")
        for fault in found:
            say(f"  {fault}")
    return EXIT_DAMAGED if any(faults.values()) else 0


def show(request: Request) -> int:
    """A table of the saves.  Sizes are checked, digests are not."""
    saves = _saves(request.folder)
    faults = {save: _faults(save, reads=False) for save in saves}
    scores = read_scores(saves[0].parent)
    whole = [int(read_manifest(save)["step"]) for save in saves if not faults[save]]
    reasons = _retention(saves[0].parent, {}).reasons(whole, scores)
    table = Table(box=None, padding=(0, 2))
    for title in ("step", "size", "saved", "roles", "files", "kept as", "score"):
        table.add_column(title, no_wrap=True)
    for save in saves:
        try:
            content = read_manifest(save)
        except (Damaged, Unreadable):
            table.add_row(str(step_of(save)), "", "", "", "no whole manifest", "", "")
            continue
        size = decimal(sum(facts["bytes"] for facts in content["files"].values()))
        state = f"{len(faults[save])} damaged" if faults[save] else "complete"
        when = datetime.fromisoformat(content["saved"]).astimezone().strftime("%Y-%m-%d %H:%M:%S")
        score = scores.get(content["step"])
        table.add_row(
            str(content["step"]), size, when, ", ".join(content["roles"]), state,
            ", ".join(reasons.get(content["step"], [])), "" if score is None else f"{score:.4g}",
        )  # fmt: skip
    console = pages()
    if not console.is_terminal:
        console.width = 120
    console.print(table)
    return 0


def prune(request: Request) -> int:
    """Delete the saves that are not to be kept, and damaged ones, unless all are; every file that stays is read."""
    saves = _saves(request.folder)
    root = saves[0].parent
    if len(saves) == 1 and request.folder.resolve() == saves[0].resolve():
        raise ValueError(f"megarl checkpoint prune {request.folder}: one save; expected the folder of a run")
    with ExitStack() as stack:
        if not request.dry_run:
            stack.enter_context(owned(root.parent if root.name == "checkpoints" else root, stays=False))
            forget_left(root, _warn)
        saves = folders_under(root)
        kept, damaged = _sorted_out(saves, _retention(root, request.keep))
        if not kept:
            raise ValueError(f"{root}: every save is damaged, so none is deleted; see megarl checkpoint verify")
        for save in saves:
            if save in kept:
                _say(f"{save.name}: kept ({', '.join(kept[save])})")
                continue
            if not request.dry_run:
                forget(save, _warn)
            because = f", because {damaged[save]}" if save in damaged else ""
            _say(f"{save.name}: {'would be deleted' if request.dry_run else 'deleted'}{because}")
    return 0


VERBS = {"verify": verify, "list": show, "prune": prune}


def _saves(folder: Path) -> list[Path]:
    """The folder itself, or the finished saves in it or in its `checkpoints/`, oldest step first."""
    if (folder / MANIFEST).is_file() or folder.name in {f.name for f in folders_under(folder.parent)}:
        return [folder]
    found = folders_under(folder) or folders_under(folder / "checkpoints")
    if not found:
        raise ValueError(f"{folder}: no saves of a run there, and no {SUMS}; expected the folder of a run or of a save")
    return found


def _faults(save: Path, *, reads: bool) -> list[str]:
    """As `faults_in`, with a sentence for what cannot be read now."""
    try:
        return faults_in(save, reads=reads)
    except Unreadable as error:
        return [str(error)]


def _retention(root: Path, given: dict[str, int]) -> Retention:
    """What the run's config.yaml says, or the defaults without one, and what is given."""
    settings = root.parent / "config.yaml"
    own = Retention.of(read_yaml(settings)) if settings.is_file() else Retention(2)
    return replace(own, **given)


def _sorted_out(saves: list[Path], retention: Retention) -> tuple[dict[Path, list[str]], dict[Path, str]]:
    """Why saves are kept, and a fault of each that is damaged.  A save is kept only after all of it has been read.

    Raises Unreadable: then none is deleted, because the one that cannot be read may be the only whole one.
    """
    scores = read_scores(saves[0].parent)
    damaged = {save: faults[0] for save in saves if (faults := faults_in(save, reads=False))}
    read: set[Path] = set()
    while True:
        steps = {step_of(save): save for save in saves if save not in damaged}
        kept = {steps[step]: why for step, why in retention.reasons(steps, scores).items() if why}
        if kept.keys() <= read:
            return kept, damaged
        damaged |= {save: faults[0] for save in kept.keys() - read if (faults := faults_in(save, reads=True))}
        read |= kept.keys()


def _warn(sentence: str) -> None:
    say(f"warning: {sentence}")


_say = partial(say, stderr=False)


OPTIONS = Options(
    "checkpoint",
    """verify   read every file, compare size and SHA-256 with what was written; exit 2 names what is damaged
list     step, size, time, roles, whether all files are there, and why each save is kept
prune    delete the saves that the run's settings do not keep; or keep=N, every=STEPS, best=N""",
    ["megarl checkpoint verify runs/quickstart", "megarl checkpoint prune runs/quickstart keep=1 every=100 --dry-run"],
    usage="megarl checkpoint verify|list|prune FOLDER [keep=N] [every=STEPS] [best=N] [--dry-run]",
)
OPTIONS.add_argument("verb", choices=VERBS, metavar="verb", help="verify | list | prune")
OPTIONS.add_argument(
    "folder", type=folder, help="of a run or of one of its saves; verify also takes an exported hf/ folder"
)
OPTIONS.add_argument("--keep", dest="newest", type=count, metavar="N", help="the newest N")
OPTIONS.add_argument("--every", type=number, metavar="STEPS", help="and those of every so many steps; 0: none")
OPTIONS.add_argument("--best", type=number, metavar="N", help="and those with the best scores; 0: none")
OPTIONS.add_argument("--dry-run", action="store_true", help="only say which would be deleted")
