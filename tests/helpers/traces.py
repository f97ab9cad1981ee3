"""Traces of torch's profiler, as tests read them."""

import gzip
import json
from pathlib import Path
from typing import Any


def events_of(trace: Path | str) -> list[dict[str, Any]]:
    """The events of a compressed trace that have a name."""
    with gzip.open(trace) as file:
        return [event for event in json.load(file)["traceEvents"] if "name" in event]
