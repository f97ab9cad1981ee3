"""What `rollout.sglang.args` changes in a plan: a few options are predicted, the others are named as not modelled.

These arguments come after ours on the server's command line, and the last one counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from megarl.config.server_options import options_of

KEY = "rollout.sglang.args"


def read(args: Sequence[str]) -> dict[str, Any]:
    """Fields of a `Job`.  Raises: ValueError of one sentence for a value that SGLang would refuse.

    Example: read(["--max-running-requests", "64", "--enable-torch-compile"]) ->
    {"max_running": 64, "not_modelled": ("rollout.sglang.args=--enable-torch-compile",)}
    """
    found: dict[str, Any] = {}
    unknown: list[str] = []
    for option, value in options_of(args):
        if option in _MODELLED:
            field, parsed = _MODELLED[option]
            new = parsed(option, value)
            if new is None:
                unknown.append(f"{KEY}={option} {value}")
            else:
                found[field] = new
        elif option not in _WITHOUT_EFFECT:
            unknown.append(f"{KEY}={option} {value}".strip())
    return found | {"not_modelled": tuple(unknown)}


def _share(option: str, text: str) -> float:
    return _number(option, text, float, "a share between 0 and 1", lambda value: 0 < value < 1)


def _count(option: str, text: str) -> int:
    return _number(option, text, int, "a whole number of at least 1", lambda value: value >= 1)


def _number(option: str, text: str, kind: type, expected: str, is_right: Callable[[Any], bool]) -> Any:
    try:
        value = kind(text)
    except ValueError:
        value = None
    if value is None or not is_right(value):
        raise ValueError(f"{KEY}={option} {text}: expected {expected}")
    return value


def _cache_width(option: str, text: str) -> int | None:  # noqa: ARG001
    """Bytes of a number in the KV cache."""
    return {"auto": 2, "bf16": 2, "bfloat16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1}.get(text)


_MODELLED: dict[str, tuple[str, Callable[[str, str], Any]]] = {
    "--mem-fraction-static": ("memory_fraction", _share),
    "--max-running-requests": ("max_running", _count),
    "--max-total-tokens": ("max_total_tokens", _count),
    "--kv-cache-dtype": ("cache_width", _cache_width),
}
_WITHOUT_EFFECT = frozenset(
    (
        "--log-level", "--log-level-http", "--log-requests", "--decode-log-interval", "--enable-metrics",
        "--random-seed", "--served-model-name", "--chat-template", "--trust-remote-code", "--watchdog-timeout",
    )
)  # fmt: skip
