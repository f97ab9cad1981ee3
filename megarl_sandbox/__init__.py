"""Runs Python code that nobody has read, such as a model's answer, so that it can do no harm.

The code runs in a process and a folder of its own: without network, without the environment's variables, without other
files than Python's own, and with limits of time, memory, processes, files and output. It gets its input from stdin, and
only its output comes back. When `run` returns, no process of the code is left.

| layer | what it stops | needed |
| --- | --- | --- |
| rlimits (`limits`) | memory, processor time, large files, fork bombs | always |
| another user (`limits`) | signals, files and processes of this user | of root |
| namespaces, a root of its own (`namespaces`) | sight of other files and processes; survivors | used if allowed |
| Landlock (`landlock`) | opening of files that are not listed | of `jail` |
| seccomp (`seccomp`) | system calls that are not listed: sockets, ptrace, mount, signals to others | always |

`layers` says what this machine has and chooses: `jail` is all of these, `bubblewrap` has the program bwrap in place of
our namespaces and Landlock, `url:` sends the code to a service. Where neither is possible there is an error, never an
ordinary process. A package of its own beside megarl: standard library only, without knowledge of rewards or models.
Called by: the reward `code`, rewards that users write, `megarl doctor`.
"""

from megarl_sandbox.layers import check, run, use
from megarl_sandbox.limits import Limits
from megarl_sandbox.program import Result, SandboxError

__all__ = ["Limits", "Result", "SandboxError", "check", "run", "use"]
