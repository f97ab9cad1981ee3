"""A user's modules and files: imported, they fill the tables of the rooms by the `register_*` decorators."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path


def load_plugins(specs: Sequence[str]) -> None:
    """Import each module ("my_package.losses") or file ("my/losses.py"), whose decorators fill the tables.

    The same file twice is loaded once.
    Raises: ValueError for a file or module that is not there; whatever the plugin itself raises.
    """
    for spec in specs:
        if spec.endswith(".py"):
            _load_file(spec)
        elif importlib.util.find_spec(spec.partition(".")[0]) is None:
            raise ValueError(f"algorithm.plugins has {spec!r}: no such module; want a module or a path ending in .py")
        else:
            importlib.import_module(spec)


def _load_file(spec: str) -> None:
    path = Path(spec).expanduser().resolve()
    if not path.is_file():
        raise ValueError(f"algorithm.plugins has {spec!r}: no such file")
    name = f"megarl_plugin_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return
    found = importlib.util.spec_from_file_location(name, path)
    assert found is not None and found.loader is not None, f"{path} ends in .py and exists, so it has a loader"
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    try:
        found.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]  # so that a second try runs it again
        raise
