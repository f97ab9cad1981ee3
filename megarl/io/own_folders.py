"""Folders that others cannot change: who may write where code, weights or a run's state are read chooses what is read.

As sshd looks at a user's keys: a folder, and all above it up to the user's home, belong to this user or to root, and
no others may write there.  Above it the sticky bit is enough, as /tmp has it.  Lists of access (ACLs) are not read.
"""

from __future__ import annotations

import grp
import os
import pwd
import stat
from pathlib import Path

RUN_FOLDER = "trainer.default_local_dir, trainer.experiment_name"
_UNSHARED = "`chmod go-w`, a folder of this user's own, or trainer.trust_shared_folders=true where all are trusted"
_ALL_USERS = (1 << 32) - 1  # mapped where nobody is left out


def check_own(folder: Path, key: str, expected: str = _UNSHARED, *, contents: bool = False) -> None:
    """Raises ValueError, one sentence that begins with `key`, if others can change what is in a folder.

    Of a folder that is not there those above it are looked at; of a link its target, too.  `contents`: all in it, too.
    """
    waiting, seen = [folder.absolute(), *(folder.absolute().rglob("*") if contents else ())], set()
    for path in waiting:
        for place in (path, *path.parents):
            if place in seen:
                break
            seen.add(place)
            try:
                found = place.lstat()
            except OSError:  # not there, or in a folder that is closed to this user
                continue
            if stat.S_ISLNK(found.st_mode):
                waiting.append(place.parent / place.readlink())
            if _is_open(found, is_above=place != path):
                raise ValueError(
                    f"{key}: others can change {folder}, as {place} has mode {stat.S_IMODE(found.st_mode):04o} and "
                    f"belongs to user {found.st_uid} and group {found.st_gid}; expected {expected}"
                )
            if place == Path(os.path.expanduser("~")) and found.st_uid == os.geteuid():
                break


def _is_open(found: os.stat_result, *, is_above: bool) -> bool:
    if found.st_uid not in (os.geteuid(), 0) and not _may_be_root(found.st_uid):
        return True
    if stat.S_ISLNK(found.st_mode) or (is_above and found.st_mode & stat.S_ISVTX):
        return False
    return bool(found.st_mode & stat.S_IWOTH or (found.st_mode & stat.S_IWGRP and not _is_own_group(found.st_gid)))


def _may_be_root(user: int) -> bool:
    """In containers of ordinary users the machine's root has the number of all who are not mapped there."""
    mapped = sum(int(line.split()[2]) for line in Path("/proc/self/uid_map").read_text().splitlines())
    return mapped < _ALL_USERS and user == int(Path("/proc/sys/kernel/overflowuid").read_text())


def _is_own_group(number: int) -> bool:
    """Whether it has the name of this user or of root, and nobody else is in it."""
    try:
        ours = {pwd.getpwuid(user).pw_name for user in (os.geteuid(), 0)}
        group = grp.getgrgid(number)
    except KeyError:  # who is in it is not known
        return False
    return group.gr_name in ours and {*group.gr_mem, *(u.pw_name for u in pwd.getpwall() if u.pw_gid == number)} <= ours
