"""`megarl report RUN [--against RUN2]`: writes the page of a run that has ended, or that goes on."""

from __future__ import annotations

from megarl.report.page import write_report
from megarl.report.request import Request
from megarl.terminal import sentences


def main(request: Request) -> int:
    """Write the page and print where it is.  Raises ValueError for a folder without metrics."""
    target = write_report(request.run, request.against)
    sentences().print(f"report: {target.resolve()}")
    return 0
