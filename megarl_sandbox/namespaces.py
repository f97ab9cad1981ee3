"""Namespaces: a network, processes, and a root folder of its own, of which the rest of the machine is no part.

A process of root may make them; another user only in a user namespace, which containers and some systems forbid.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Sequence
from pathlib import Path

from megarl_sandbox.kernel import (
    CLONE_NEWIPC,
    CLONE_NEWNET,
    CLONE_NEWNS,
    CLONE_NEWPID,
    CLONE_NEWUSER,
    CLONE_NEWUTS,
    PR_SET_PDEATHSIG,
    mount,
    prctl,
    syscall,
    unmount,
    unshare,
)
from megarl_sandbox.limits import Limits

WORK = "/tmp"  # the program's folder in its own root

_RDONLY, _NOSUID, _NODEV, _BIND, _REC, _PRIVATE = 1, 2, 4, 1 << 12, 1 << 14, 1 << 18
_DETACH = 2
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE = 442, -100, 0x8000


def enter() -> None:
    """Go on in new namespaces, as their first process: when it ends, the kernel ends all others in them.

    The calling process stays outside as the parent: it never returns, and ends as its child ended.  Raises OSError.
    """
    user, group = os.geteuid(), os.getegid()
    unshare(CLONE_NEWNS | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWPID | (CLONE_NEWUSER if user else 0))
    if user:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    child = os.fork()
    if child:
        _end_as(child)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def own_root(folder: str, readable: Sequence[str], devices: Sequence[str], limits: Limits, owner: int) -> None:
    """Replace the root folder by one that has only these paths, for reading, and WORK, in memory and of limited size.

    folder: where the new root is put together; its content stays as it is.  Raises OSError.
    """
    os.umask(0o022)
    mount("none", "/", None, _REC | _PRIVATE)
    mount("tmpfs", folder, "tmpfs", _NOSUID | _NODEV, "size=1m,mode=755")
    for path in (*readable, *devices):
        _show(path, folder + path)
    os.mkdir(folder + WORK)
    size = f"size={limits.folder_bytes},nr_inodes={limits.files},mode=700,uid={owner},gid={owner if owner else 0}"
    os.chdir(folder)
    syscall(_PIVOT_ROOT[os.uname().machine], b".", b".")
    unmount(".", _DETACH)
    os.chdir("/")
    _set_read_only("/", recursive=True)
    mount("tmpfs", WORK, "tmpfs", _NOSUID | _NODEV, size)


def _show(path: str, place: str) -> None:
    os.makedirs(os.path.dirname(place), exist_ok=True)
    if os.path.islink(path):  # /lib -> usr/lib
        os.symlink(os.readlink(path), place)
        return
    if os.path.isdir(path):
        os.makedirs(place, exist_ok=True)
    else:
        os.close(os.open(place, os.O_CREAT | os.O_WRONLY))
    mount(path, place, None, _BIND | _REC)


def _set_read_only(path: str, *, recursive: bool) -> None:
    attributes = ctypes.create_string_buffer(_RDONLY.to_bytes(8, "little"), 32)  # struct mount_attr
    flags = _AT_RECURSIVE if recursive else 0
    syscall(_MOUNT_SETATTR, _AT_FDCWD, os.fsencode(path), flags, attributes, 32)


def _end_as(child: int) -> None:
    os.closerange(0, 4)  # else the pipes stay open as long as this process
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        os.kill(os.getpid(), -code)
        os.kill(os.getpid(), signal.SIGKILL)  # the first one does not end a process by default
    os._exit(code)
