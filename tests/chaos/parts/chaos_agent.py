"""The episode of examples/guessing_game.py, which fails when it is ordered to."""

import asyncio
import importlib.util
from pathlib import Path
from typing import Any

from chaos_claims import obey

_spec = importlib.util.spec_from_file_location("guessing_game", Path("examples/guessing_game.py"))
assert _spec is not None and _spec.loader is not None, "the run's folder has the examples"
_game = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_game)


async def episode(chat: Any, prompt: Any) -> Any:
    if obey("episode") == "hang":
        await asyncio.Event().wait()
    return await _game.episode(chat, prompt)
