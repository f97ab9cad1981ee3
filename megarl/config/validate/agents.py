"""Checks of agents: which one there is, and what does not go with episodes."""

from __future__ import annotations

from collections.abc import Iterator
from os.path import expanduser, isfile

from megarl.config import names
from megarl.config.schema import Config
from megarl.config.settings import show


def contradictions(config: Config) -> Iterator[str]:
    """One sentence for each fault."""
    agent = config.agent
    if not config.has_agents:
        return
    if agent.fn is not None and agent.command:
        yield f"agent.command={show(agent.command)}: expected [], because agent.fn={agent.fn} is the agent"
    if agent.fn is not None:
        yield from _no_such(agent.fn)
    assert agent.max_tokens is not None, "it is resolved"
    if agent.max_tokens <= config.data.max_prompt_length:
        longest = f"data.max_prompt_length={config.data.max_prompt_length}"
        yield f"agent.max_tokens={agent.max_tokens}: expected more than {longest}, which an episode begins with"
    if config.data.overlong_prompts not in ("error", "filter"):
        wanted = "expected error or filter, because agents get the messages of a prompt, not its tokens"
        yield f"data.overlong_prompts={config.data.overlong_prompts}: {wanted}"
    if config.algorithm.overlong_buffer.enable:
        yield "algorithm.overlong_buffer.enable=true: expected false, because episodes have several answers"
    if config.trainer.check_export:
        yield "trainer.check_export=true: expected false, because transformers' generation runs no agents"


def _no_such(fn: str) -> Iterator[str]:
    prefix, colon, address = fn.partition(":")
    if prefix in names.AGENT_ADAPTERS:
        return
    place = fn.rpartition(":")[0]
    if not colon or not prefix or not address:
        known = "".join(f", {name}:..." for name in names.AGENT_ADAPTERS)
        yield f"agent.fn={fn}: expected path/to/file.py:function, package.module:function{known}"
    elif place.endswith(".py") and not isfile(expanduser(place)):
        yield f"agent.fn={fn}: expected a file that exists, as path/to/file.py:function"
