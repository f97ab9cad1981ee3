"""Which environment variables a process gets that has no use for secrets: a list of what is allowed.

Whoever starts a run often has keys of services in the environment: of trackers, of hubs, of clouds.  A list of what is
forbidden would always miss one.
"""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing import forkserver

_LISTED = """
PATH HOME USER LOGNAME SHELL LANG LANGUAGE TZ TMPDIR TERM PWD VIRTUAL_ENV CONDA_PREFIX LD_LIBRARY_PATH LD_PRELOAD
CUDA_HOME CUDA_VISIBLE_DEVICES HF_HOME HF_HUB_CACHE HF_HUB_OFFLINE HF_DATASETS_CACHE HF_DATASETS_OFFLINE
TRANSFORMERS_OFFLINE TOKENIZERS_PARALLELISM XDG_CACHE_HOME SSL_CERT_FILE SSL_CERT_DIR REQUESTS_CA_BUNDLE
"""
_NAMES = frozenset(_LISTED.split())
_BEGINNINGS = ("LC_", "PYTHON", "OMP_", "MKL_", "OPENBLAS_", "NUMEXPR_")
_PROXIES = frozenset({"HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"})


def is_allowed(name: str, value: str) -> bool:
    """Whether a variable is on the list; a proxy's address only if it has no password."""
    if name.upper() in _PROXIES:
        return "@" not in value
    return name in _NAMES or name.startswith(_BEGINNINGS)


def allowed_variables() -> dict[str, str]:
    """The allowed variables of this process, for a program that it starts.

    Not even /proc/PID/environ of such a program shows the others, and its own children inherit what it has.
    """
    return {name: value for name, value in os.environ.items() if is_allowed(name, value)}


def start_fork_server(*preloaded: str) -> None:
    """Start multiprocessing's fork server: processes that it forks later have the variables that this one has now.

    `preloaded`: modules that it imports.  Does nothing if it runs already.
    """
    multiprocessing.set_forkserver_preload(list(preloaded))
    forkserver.ensure_running()
