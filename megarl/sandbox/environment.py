"""Which environment variables a process gets that has no use for secrets: a list of what is allowed.

Whoever starts a run often has keys of services in the environment: of trackers, of hubs, of clouds.  A list of what is
forbidden would always miss one.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_LISTED = """
PATH HOME USER LOGNAME SHELL LANG LANGUAGE TZ TMPDIR TERM PWD VIRTUAL_ENV CONDA_PREFIX LD_LIBRARY_PATH LD_PRELOAD
CUDA_HOME CUDA_VISIBLE_DEVICES HF_HOME HF_HUB_CACHE HF_HUB_OFFLINE HF_DATASETS_CACHE HF_DATASETS_OFFLINE
TRANSFORMERS_OFFLINE TOKENIZERS_PARALLELISM XDG_CACHE_HOME SSL_CERT_FILE SSL_CERT_DIR REQUESTS_CA_BUNDLE
"""
_NAMES = frozenset(_LISTED.split())
_BEGINNINGS = ("LC_", "PYTHON", "OMP_", "MKL_", "OPENBLAS_", "NUMEXPR_")
_PROXIES = frozenset({"HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"})
_lock = threading.Lock()


def is_allowed(name: str, value: str) -> bool:
    """Whether a variable is on the list; a proxy's address only if it has no password."""
    if name.upper() in _PROXIES:
        return "@" not in value
    return name in _NAMES or name.startswith(_BEGINNINGS)


@contextmanager
def children_without_secrets() -> Iterator[None]:
    """Programs that are started inside get allowed variables only; `os.environ` of this process stays as it is.

    Not even /proc/PID/environ of such a process shows the others.
    """
    with _lock:
        hidden = {name: value for name, value in os.environ.items() if not is_allowed(name, value)}
        try:
            for name in hidden:
                os.unsetenv(name)  # what a new program inherits, which is not `os.environ`
            yield
        finally:
            for name, value in hidden.items():
                os.putenv(name, value)
