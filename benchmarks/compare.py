"""Whether a result is worse than a stored one of the same hardware.

    python benchmarks/compare.py NEW.json                   against the newest of its kind in benchmarks/results/
    python benchmarks/compare.py NEW.json STORED.json       against that one
    python benchmarks/compare.py NEW.json --limit 0.1       10 % in place of 5 %

Compared are the ratios that a benchmark prints last.  Exit code 1: one of them is worse by more than the limit; 2:
there is nothing to compare with.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))  # the repository

from benchmarks.common import page

EXIT_WORSE = 1
LIMIT = 0.05
# Ratios of which less is better, by the last words of their names; of all others more is, as of what stands `per` a
# second, and of another's figure `over` ours.
LESS = re.compile(
    r"^(?!(.*_)?(per|over)_)(.*_)?(s|seconds|ms|us|bytes|waste|unaccounted|overhead|cost|imbalance|bubble|error)$"
)
SMALL = 0.01  # of shares and errors, whose best is 0, changes below this count for nothing
SHARES = re.compile(r"(^|_)(waste|unaccounted|overhead|imbalance|bubble|error)$")
# Says how sure a number is, and is none itself.
SPREAD = re.compile(r"(^|_)(lowest|highest|low|high|least|most|spread)(_|$)")


class Change(NamedTuple):
    """One ratio then and now; `worse`: by how much of its old value, negative for better."""

    name: str
    before: float
    now: float
    worse: float

    def is_regression(self, limit: float) -> bool:
        if SHARES.search(self.name) and abs(self.now - self.before) < SMALL:
            return False
        return self.worse > limit


def compare(new: dict[str, Any], stored: dict[str, Any]) -> list[Change]:
    """The ratios that both have.  ValueError for results of two kinds, of other hardware, or without a common ratio."""
    for key in ("theme", "hardware", "device"):
        if new[key] != stored[key]:
            raise ValueError(
                f"{key}: the new result has {new[key]!r} and the stored {stored[key]!r}; expected the same"
            )
    then, now = page.ratios_of(stored), page.ratios_of(new)
    names = [name for name in now if name in then and not SPREAD.search(name)]
    if not names:
        raise ValueError(
            f"the stored result has none of {', '.join(now) or 'no ratios'}; expected one of the same script"
        )
    return [_change(name, then[name], now[name]) for name in names]


def _change(name: str, before: float, now: float) -> Change:
    grown = now - before if LESS.search(name) else before - now
    return Change(name, before, now, grown / abs(before) if before else (0.0 if grown <= 0 else float("inf")))


def differences(new: dict[str, Any], stored: dict[str, Any]) -> list[str]:
    """What else is another: numbers of two configurations compare only as far as that means nothing."""
    keys = dict.fromkeys([*new["configuration"], *stored["configuration"]])
    changed = [key for key in keys if new["configuration"].get(key) != stored["configuration"].get(key)]
    out = [f"{key}: {stored['configuration'].get(key)} -> {new['configuration'].get(key)}" for key in changed]
    return out + [
        f"{key}: {stored[key]} -> {new[key]}" for key in ("versions", "commit", "load") if new[key] != stored[key]
    ]


def newest_like(new: dict[str, Any], file: Path, folder: Path) -> Path:
    """The newest other result of the same theme and hardware, the last of its day.  ValueError where there is none."""
    found: list[tuple[str, int, Path]] = []
    for other in folder.glob(f"{page.slug(new['theme'])}_*.json"):
        said = json.loads(other.read_text())
        if other.resolve() != file.resolve() and all(
            said.get(key) == new[key] for key in ("theme", "hardware", "device")
        ):
            found.append((said["date"], len(other.name), other))  # _10 comes behind _2
    if not found:
        raise ValueError(
            f"{folder}: no result of {new['theme']} on {new['hardware']}; expected a stored one to compare with"
        )
    return max(found)[-1]


def show(console: Console, changes: list[Change], limit: float) -> None:
    table = Table("ratio", "stored", "new", "change", "")
    for change in changes:
        verdict = f"worse by more than {limit:.0%}" if change.is_regression(limit) else ""
        share = f"{change.now / change.before - 1:+.1%}" if change.before else ""
        table.add_row(change.name, page.cell(change.before), page.cell(change.now), share, verdict)
    console.print(table)


def main(argv: list[str] | None = None) -> int:
    """Print the table; 1 where something got worse."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("new", type=Path, help="the JSON file of a result")
    parser.add_argument("stored", type=Path, nargs="?", help="another one (the newest of its kind in --results)")
    parser.add_argument("--limit", type=float, default=LIMIT, help=f"share by which a ratio may be worse ({LIMIT})")
    parser.add_argument("--results", type=Path, default=page.RESULTS, help="folder of stored results")
    options = parser.parse_args(argv)
    try:
        new = read(options.new)
        file = options.stored or newest_like(new, options.new, options.results)
        stored = read(file)
        changes = compare(new, stored)
    except ValueError as error:
        sys.stderr.write(f"error: {error}\n")
        return page.EXIT_USAGE
    console = page.terminal()
    console.print(f"{options.new} against {file}", highlight=False, soft_wrap=True)
    show(console, changes, options.limit)
    for sentence in differences(new, stored):
        console.print(f"- {sentence}", highlight=False, markup=False)
    return EXIT_WORSE if any(change.is_regression(options.limit) for change in changes) else 0


def read(file: Path) -> dict[str, Any]:
    """ValueError where it is no result of a benchmark."""
    try:
        said = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{file}: cannot be read as a result ({error})") from None
    if not isinstance(said, dict) or (missing := [key for key in page.KEYS if key not in said]):
        lacks = ", ".join(missing) if isinstance(said, dict) else "everything"
        raise ValueError(f"{file}: it lacks {lacks}; expected the JSON file of a benchmark")
    return said


if __name__ == "__main__":
    raise SystemExit(main())
