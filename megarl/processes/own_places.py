"""Where the programs of a run put temporary files and what they compile: in folders that are this user's alone.

Torch and others keep compiled code, and pickles beside it, in the temporary folder under names that everybody knows,
and run what they find there.  So programs get a temporary folder of this run, which goes with it, and caches at home.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megarl.io.durable_files import PRIVATE_FOLDER
from megarl.io.own_folders import check_own
from megarl.io.terminal import say
from megarl.processes.programs import only_variables

# Caches of torch, SGLang and what it needs: in the temporary folder, or at home, unless these variables are set.
_TEMPORARY = "TORCHINDUCTOR CUTE_DSL FLASH_ATTENTION_CUTE_DSL FLEX_ATTENTION_CUTE_DSL QUACK"  # with _CACHE_DIR
_AT_HOME = """
TRITON_HOME TRITON_CACHE_DIR TORCH_EXTENSIONS_DIR PYTORCH_KERNEL_CACHE_PATH CUDA_CACHE_PATH SGLANG_CACHE_DIR
SGLANG_DG_CACHE_DIR SGLANG_CUTE_AOT_CACHE_DIR SGLANG_JIT_CACHE_DIR DG_JIT_CACHE_DIR FLASHINFER_WORKSPACE_BASE
FLASHINFER_CUBIN_DIR TILELANG_CACHE_DIR TVM_FFI_CACHE_DIR CUDNN_FRONTEND_COMPILED_CACHE
"""
_EXPECTED = "a folder that no other user can change, since code from it is run: `chmod go-w` it, or name another one"
_LONGEST = 59  # characters of the place of that folder: the name of a socket in it may have 107
_LOCK = ".lock"  # in the temporary folder of a run that lives, or that was killed


@contextmanager
def own_places() -> Iterator[None]:
    """Programs that are started meanwhile get these folders; this process keeps its temporary folder.

    Raises ValueError if others can change one of them, ours or one that a variable names.
    """
    ours = {f"{name}_CACHE_DIR": name.lower() for name in _TEMPORARY.split()}
    for name in (*ours, *_AT_HOME.split()):
        if folder := os.environ.get(name):
            check_own(Path(folder).expanduser(), f"{name}={folder}", _EXPECTED)
    with _temporary() as temporary:
        root = _caches() or temporary
        given = {name: f"{root}/{folder}" for name, folder in ours.items()}
        with only_variables({**given, **os.environ, "TMPDIR": temporary}):
            yield


@contextmanager
def _temporary() -> Iterator[str]:
    """A temporary folder; those of runs that were killed are removed."""
    place = tempfile.gettempdir()
    if len(place) > _LONGEST:
        say(f"warning: TMPDIR={place} is too long for names of sockets: temporary files of programs are in /tmp")
        place = "/tmp"
    for lock in Path(place).glob(f"megarl-*/{_LOCK}"):
        with suppress(OSError):
            if lock.parent.lstat().st_uid == os.geteuid():
                with lock.open("rb") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError: its run lives
                    shutil.rmtree(lock.parent)
    with tempfile.TemporaryDirectory(prefix="megarl-", dir=place, ignore_cleanup_errors=True) as folder:
        check_own(Path(folder), f"TMPDIR={place}", _EXPECTED)
        Path(folder).chmod(0o711)  # programs of a sandbox, which have users of their own, have folders in it
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
            with suppress(OSError):  # a file system without locks: it stays when the run is killed
                fcntl.flock(file, fcntl.LOCK_EX)
                Path(file.name).rename(f"{folder}/{_LOCK}")
            yield folder


def _caches() -> str | None:
    """The folder of caches at home; None, which is said: there is none that can be written, by this user alone."""
    try:
        root = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "megarl", "compiled").expanduser()
        check_own(root, f"XDG_CACHE_HOME, {root}", _EXPECTED)
        root.mkdir(PRIVATE_FOLDER, parents=True, exist_ok=True)
        check_own(root, f"XDG_CACHE_HOME, {root}", _EXPECTED)  # another user can have made it
        os.rmdir(tempfile.mkdtemp(dir=root))
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: this user has no home
        say(f"warning: what programs compile goes with this run: {error}")
        return None
    return str(root)
