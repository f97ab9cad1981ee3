"""Finds the function that `agent.fn` names, and how it is to be called: by the names of its parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from megarl.plugins.load import absolute, is_async, user_function

# prefix of agent.fn -> module
ADAPTERS: dict[str, str] = {
    "tools": "megarl.agents.adapters.tools",
    "verifiers": "megarl.agents.adapters.verifiers",
}
CHAT, ENDPOINT, PROCESS = "chat", "endpoint", "process"
_OWN = ("chat", "base_url", "api_key", "prompt")  # parameters that an episode gets from us
_WANTED = "async def episode(chat, prompt), async def or def episode(base_url, prompt), or (base_url, api_key, prompt)"


@dataclass(frozen=True)
class EpisodeFn:
    """A user's function and how it is called.

    way: "chat": awaited with a Chat; "endpoint": awaited with the address of the endpoint; "process": the same, but an
    ordinary function, which runs in a process of its own.
    """

    function: Callable[..., Any]
    way: str
    wants_key: bool = False  # it has a parameter api_key
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def call(self, **own: Any) -> Any:
        """`own`: chat and prompt; or base_url, api_key and prompt."""
        if not self.wants_key:
            own.pop("api_key", None)
        return self.function(**own, **self.arguments)


def load_episode(fn: str, arguments: Mapping[str, Any]) -> EpisodeFn:
    """The function behind `agent.fn`: "path/file.py:function", "package.module:function", or "PREFIX:..." of ADAPTERS.

    `arguments`: agent.args, further keyword arguments of the function; an adapter may take some of them for itself.
    Raises ValueError of one sentence if there is no such function or it takes other arguments.
    """
    setting = f"agent.fn={fn}"
    prefix, colon, address = fn.partition(":")
    if prefix in ADAPTERS:
        return _adapt(setting, import_module(ADAPTERS[prefix]).load(address, arguments), {})
    if not colon or not prefix or not address:
        known = "".join(f", {name}:..." for name in ADAPTERS)
        raise ValueError(f"{setting}: expected path/to/file.py:function, package.module:function{known}")
    return _adapt(setting, user_function(setting, fn), arguments)


def absolute_address(fn: str) -> str:
    """agent.fn with an absolute file path, which is valid in any working directory."""
    address = without_prefix(fn)
    return fn.removesuffix(address) + absolute(address)


def without_prefix(fn: str) -> str:
    """The part of agent.fn that an adapter gets; without an adapter, all of it."""
    prefix, _, address = fn.partition(":")
    return address if prefix in ADAPTERS else fn


def _adapt(setting: str, function: Callable[..., Any], arguments: Mapping[str, Any]) -> EpisodeFn:
    signature = inspect.signature(function)
    named = [name for name in _OWN if name in signature.parameters]
    if named not in (["chat", "prompt"], ["base_url", "prompt"], ["base_url", "api_key", "prompt"]):
        raise ValueError(f"{setting}: it takes ({', '.join(signature.parameters)}); expected {_WANTED}")
    try:
        signature.bind(**dict.fromkeys(named), **arguments)
    except TypeError as error:
        raise ValueError(f"{setting} with agent.args={dict(arguments)}: {error}") from None
    way = CHAT if "chat" in named else ENDPOINT
    if not is_async(function):
        if way == CHAT:
            raise ValueError(f"{setting}: a function with the parameter chat has to be `async def`")
        way = PROCESS
    return EpisodeFn(function, way, "api_key" in named, dict(arguments))
