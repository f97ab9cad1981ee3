#!/usr/bin/env python
"""Writes the newest versions of the agents that the tests drive, and of all they need: launch/agents*.txt.

    .venv/bin/python launch/agent_pins.py            the pins
    .venv/bin/python launch/agent_pins.py FOLDER     the same files elsewhere, as `launch/agents.sh --newest` wants

uv resolves by metadata, from the package index alone; nothing is installed.  Python 3.12 takes the versions of 3.11.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from check_pins import GLIBC, ROOT, compile_pins

# As few environments as agree.  instructor wants an older jiter than the newest openai.
CLIENTS = {
    "agents.txt": (
        "ag2[openai]",
        "anthropic",
        "dspy",
        "langchain",
        "langchain-openai",
        "langgraph",
        "litellm",
        "mini-swe-agent",
        "openai",
        "openai-agents",
        "pydantic-ai-slim[anthropic,openai]",
        "smolagents[openai]",
    ),
    "agents_instructor.txt": ("anthropic", "instructor"),
}
HEADER = """\
# Written by launch/agent_pins.py, not by hand: agents that the tests drive, with all they need, for Python 3.11 and
# 3.12.  Installed by launch/agents.sh into an environment of their own, as agents never share ours.
"""


def newest(clients: Sequence[str]) -> tuple[str, list[str]]:
    """A file of pins, and the clients whose newest version does not fit with the others.

    ValueError in the resolver's words if these clients do not fit together at all.
    """
    together = _resolved(clients)
    return HEADER + together, sorted(set(_resolved(clients, "--no-deps").split()) - set(together.split()))


def _resolved(clients: Sequence[str], *options: str) -> str:
    found = compile_pins(clients, "3.11", GLIBC, (), "--no-header", "--no-annotate", *options)
    if found.returncode != 0:
        raise ValueError(f"{', '.join(clients)}: {found.stderr.strip()}")
    return found.stdout


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "launch"
    folder.mkdir(parents=True, exist_ok=True)
    for name, clients in CLIENTS.items():
        pins, left_out = newest(clients)
        (folder / name).write_text(pins)
        for pin in left_out:
            print(f"{name}: {pin} does not fit with the others; there is an older one")


if __name__ == "__main__":
    main()
