"""Landlock: a process gives up the right to open files, except beneath the folders that it lists.

Linux 5.13 has it, if it is enabled there; later versions ("ABI" 2, 3, ...) know more rights.  It restricts what a file
is opened for, not whether its name can be seen, nor who may change its mode or owner: `seccomp` stops the latter.
"""

from __future__ import annotations

import ctypes
import os
import stat
import struct
from collections.abc import Sequence

from megarl_sandbox.kernel import syscall

_CREATE, _ADD, _RESTRICT = 444, 445, 446  # the same numbers on every processor
_PATH_BENEATH, _VERSION = 1, 1

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_MAKE_CHAR, _MAKE_SOCK, _MAKE_BLOCK = 1 << 6, 1 << 9, 1 << 11
_REFER, _TRUNCATE, _IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15
_RIGHTS_OF_ABI = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}  # number of rights to files: the lowest bits
_OF_A_FILE = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV  # others make sense for folders only

READ = _EXECUTE | _READ_FILE | _READ_DIR
DEVICE = _READ_FILE | _WRITE_FILE
WORK = ((1 << 16) - 1) & ~(_MAKE_CHAR | _MAKE_BLOCK | _MAKE_SOCK | _IOCTL_DEV)

_TCP, _SCOPES = 0b11, 0b11  # bind and connect; abstract unix sockets and signals


def abi() -> int:
    """The version of the kernel's Landlock; 0 if there is none."""
    try:
        return syscall(_CREATE, None, 0, _VERSION)
    except OSError:
        return 0


def restrict(rules: Sequence[tuple[str, int]]) -> None:
    """From now on this process and its children open only what (path, rights) list; nothing takes this back.

    Paths that do not exist are left out.  TCP, and signals to processes outside, are given up where the kernel can.
    Needs PR_SET_NO_NEW_PRIVS.  Raises OSError.
    """
    version = abi()
    rights = (1 << _RIGHTS_OF_ABI[min(version, 5)]) - 1
    words = [rights, *([_TCP] if version >= 4 else []), *([_SCOPES] if version >= 6 else [])]
    attributes = ctypes.create_string_buffer(struct.pack(f"={len(words)}Q", *words), 8 * len(words))
    ruleset = syscall(_CREATE, attributes, 8 * len(words), 0)
    for path, wanted in rules:
        try:
            descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        granted = wanted & rights
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            granted &= _OF_A_FILE
        rule = ctypes.create_string_buffer(struct.pack("=Qi", granted, descriptor), 12)
        syscall(_ADD, ruleset, _PATH_BENEATH, rule, 0)
        os.close(descriptor)
    syscall(_RESTRICT, ruleset, 0)
    os.close(ruleset)
