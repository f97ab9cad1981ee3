"""The report of a failure: the traceback, and what the ranks said, in a file of the run's logs."""

from __future__ import annotations

import os
import tempfile
import traceback
from contextlib import suppress
from pathlib import Path


def write_report(error: Exception, file: Path) -> str:
    """Write the traceback and the ranks' reports to `file`; returns where they are, in words.

    Where that cannot be written, because the disk is full, they go to a temporary folder, or nowhere.
    """
    text = "".join(traceback.format_exception(error)) + getattr(error, "report", "")
    refusals: list[str] = []
    for report, begin in ((file, _in_its_folder), (Path(tempfile.gettempdir()), _in_a_new_file)):
        try:
            report = begin(file)  # noqa: PLW2901
            report.write_text(text)
        except OSError as refusal:
            with suppress(OSError):  # half of it, if any
                report.unlink()
            refusals.append(f"{report} could not be written ({refusal.strerror})")
        else:
            return "; ".join([*refusals, f"all of it: {report}"])
    return "; ".join(refusals)


def _in_its_folder(file: Path) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    return file


def _in_a_new_file(file: Path) -> Path:
    """In the temporary folder, where others could have put a link under any name that they can guess."""
    number, name = tempfile.mkstemp(prefix=f"megarl_{file.stem}_", suffix=file.suffix)
    os.close(number)
    return Path(name)
