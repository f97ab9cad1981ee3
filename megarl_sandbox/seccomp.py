"""seccomp: a process gives up all system calls but those that a program needs to compute.

The list allows; what is not on it is refused, so that a call that a new kernel adds is refused, too.  Some calls are
allowed with some arguments only, because they also reach processes of the same user that are none of the program's:
signals, limits, owners of files' signals.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import struct
from collections.abc import Sequence
from typing import NamedTuple

from megarl_sandbox.kernel import PR_SET_SECCOMP, prctl

# Name, number on x86-64, number on aarch64 ("-": there is none).
_CALLS = """
read 0 63            write 1 64            pread64 17 67         pwrite64 18 68        readv 19 65
writev 20 66         preadv 295 69         pwritev 296 70        preadv2 327 286       pwritev2 328 287
lseek 8 62           close 3 57            close_range 436 436   dup 32 23             dup2 33 -
dup3 292 24          pipe 22 -             pipe2 293 59          sendfile 40 71        copy_file_range 326 285

open 2 -             openat 257 56         creat 85 -            stat 4 -              lstat 6 -
fstat 5 80           newfstatat 262 79     statx 332 291         statfs 137 43         fstatfs 138 44
access 21 -          faccessat 269 48      faccessat2 439 439    readlink 89 -         readlinkat 267 78
getdents 78 -        getdents64 217 61     getcwd 79 17          chdir 80 49           fchdir 81 50
mkdir 83 -           mkdirat 258 34        rmdir 84 -            unlink 87 -           unlinkat 263 35
rename 82 -          renameat 264 38       renameat2 316 276     link 86 -             linkat 265 37
symlink 88 -         symlinkat 266 36      ftruncate 77 46       fallocate 285 47      fsync 74 82
fdatasync 75 83      fadvise64 221 223     umask 95 166

mmap 9 222           munmap 11 215         mremap 25 216         mprotect 10 226       madvise 28 233
mincore 27 232       msync 26 227          brk 12 214            membarrier 324 283

poll 7 -             ppoll 271 73          select 23 -           pselect6 270 72       epoll_create 213 -
epoll_create1 291 20 epoll_ctl 233 21      epoll_wait 232 -      epoll_pwait 281 22    epoll_pwait2 441 441
eventfd 284 -        eventfd2 290 19       timerfd_create 283 85 timerfd_settime 286 86
timerfd_gettime 287 87                     signalfd 282 -        signalfd4 289 74
sendto 44 206        recvfrom 45 207       shutdown 48 210       getsockopt 55 209     getsockname 51 204

fork 57 -            vfork 58 -            execve 59 221         exit 60 93            exit_group 231 94
wait4 61 260         waitid 247 95         futex 202 98          set_robust_list 273 99
set_tid_address 218 96                     rseq 334 293          gettid 186 178        getpid 39 172
getppid 110 173      getpgid 121 155       getpgrp 111 -         getsid 124 156        getuid 102 174
geteuid 107 175      getgid 104 176        getegid 108 177       getresuid 118 148     getresgid 120 150
getgroups 115 158    capget 125 90         sched_yield 24 124    sched_getaffinity 204 123
sched_getparam 143 121                     sched_getscheduler 145 120
sched_get_priority_max 146 125             sched_get_priority_min 147 126              getpriority 140 141

rt_sigaction 13 134  rt_sigprocmask 14 135 rt_sigreturn 15 139   rt_sigpending 127 136 rt_sigsuspend 130 133
rt_sigtimedwait 128 137                    sigaltstack 131 132   pause 34 -            alarm 37 -
getitimer 36 102     setitimer 38 103      restart_syscall 219 128                     timer_create 222 107
timer_settime 223 110                      timer_gettime 224 108 timer_getoverrun 225 109
timer_delete 226 111 nanosleep 35 101      clock_nanosleep 230 115                     clock_gettime 228 113
clock_getres 229 114 gettimeofday 96 169   time 201 -            times 100 153         getrlimit 97 163
setrlimit 160 164    getrusage 98 165      sysinfo 99 179        uname 63 160          getcpu 309 168
getrandom 318 278    arch_prctl 158 -

clone 56 220         kill 62 129           tgkill 234 131        prlimit64 302 261     prctl 157 167
fcntl 72 25          ioctl 16 29           socketpair 53 199
"""

# Name -> which argument -> its allowed values; all of these arguments are int.
_ONLY: dict[str, dict[int, tuple[int, ...]]] = {
    "prlimit64": {0: (0,)},  # its own limits, not those of another process
    "prctl": {0: (3, 15, 16, 23, 0x53564D41)},  # PR_GET_DUMPABLE, names of threads and of memory, PR_CAPBSET_READ
    # DUPFD, GETFD, SETFD, GETFL, SETFL, locks, DUPFD_CLOEXEC; F_SETOWN would let files send signals
    "fcntl": {1: (0, 1, 2, 3, 4, 5, 6, 7, 36, 37, 38, 1030)},
    "ioctl": {1: (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)},  # TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, F(N)CLEX
    # AF_UNIX, SOCK_STREAM with its flags: a pair of datagram sockets could send to any other unix socket
    "socketpair": {0: (1,), 1: tuple(1 | flags for flags in (0, 0x800, 0x80000, 0x80800))},
}
_TO_PROCESSES = ("kill", "tgkill")
_NAMESPACES = 0x7E020000  # flags of clone


class _Processor(NamedTuple):
    audit: int  # AUDIT_ARCH_*
    column: int  # of _CALLS


_PROCESSORS = {"x86_64": _Processor(0xC000003E, 0), "aarch64": _Processor(0xC00000B7, 1)}
_NEWER = 424  # the first number that is the same on all processors: calls that a C library does without

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER_AT, _AUDIT_AT, _ARGUMENTS_AT = 0, 4, 16  # in struct seccomp_data


def is_supported() -> bool:
    """Whether this processor has a list, and the kernel can filter calls."""
    if platform.machine() not in _PROCESSORS:
        return False
    try:
        prctl(PR_SET_SECCOMP, 2, None)  # SECCOMP_MODE_FILTER without a filter
    except OSError as error:
        return error.errno == errno.EFAULT
    return True


def numbers(machine: str) -> dict[str, int]:
    """The allowed calls of a processor, x86_64 or aarch64: name -> number."""
    words = _CALLS.split()
    column = _PROCESSORS[machine].column
    found = {name: pair[column] for name, *pair in zip(words[::3], words[1::3], words[2::3], strict=True)}
    return {name: int(number) for name, number in found.items() if number != "-"}


def filter_program(targets: Sequence[int]) -> bytes:
    """The filter as instructions of classic BPF.  `targets`: the processes that a signal may be sent to; 0: own group.

    A refused call fails with EPERM; an unknown newer one with ENOSYS, so that the C library uses an older one.
    """
    machine = platform.machine()
    only = _ONLY | {name: {0: tuple(targets)} for name in _TO_PROCESSES}
    lines = [(_LOAD, _AUDIT_AT), (_EQUAL, _PROCESSORS[machine].audit, 1, 0), (_RETURN, _KILL), (_LOAD, _NUMBER_AT)]
    for name, number in numbers(machine).items():
        if name == "clone":
            checks = [(_ANY_BIT, _NAMESPACES, 0, 1), (_RETURN, _ERROR | errno.EPERM), (_RETURN, _ALLOW)]
            lines += [(_EQUAL, number, 0, len(checks) + 1), (_LOAD, _ARGUMENTS_AT), *checks]
        elif name in only:
            checks = []
            for argument, values in only[name].items():
                checks.append((_LOAD, _ARGUMENTS_AT + 8 * argument))  # its lower half, all that the kernel reads
                # an equal value jumps over the other ones and the refusal
                checks += [(_EQUAL, value, len(values) - at, 0) for at, value in enumerate(values)]
                checks.append((_RETURN, _ERROR | errno.EPERM))
            lines += [(_EQUAL, number, 0, len(checks) + 1), *checks, (_RETURN, _ALLOW)]
        else:
            lines += [(_EQUAL, number, 0, 1), (_RETURN, _ALLOW)]
    lines += [(_AT_LEAST, _NEWER, 0, 1), (_RETURN, _ERROR | errno.ENOSYS), (_RETURN, _ERROR | errno.EPERM)]
    return b"".join(struct.pack("=HBBI", code, *(jumps or (0, 0)), operand) for code, operand, *jumps in lines)


def restrict(program: bytes) -> None:
    """From now on the filter decides about the calls of this process and its children; nothing takes this back.

    Needs PR_SET_NO_NEW_PRIVS.  Raises OSError.
    """
    instructions = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(instructions))
    prctl(PR_SET_SECCOMP, 2, ctypes.create_string_buffer(header, len(header)))
