"""Known causes of a run's end: what is written where, what it means in one sentence, and what to do next.

The sentence with which the run ended counts most, then its failure.txt, then logs: these also have warnings of hours
ago that the run survived.  Within a text the table is read from the top: what says more stands above what says less.
Sentences that only tell who ended, as that a rank died without a word, are a second table: they are the cause only if
no text, such as the log of that rank, shows another.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from megarl.processes.lifetime import KILLED


class Source(NamedTuple):
    """A text of a run's folder.  Example: Source("logs/failure.txt", "Traceback ...")"""

    name: str
    text: str


class Cause(NamedTuple):
    """`says` and `next` may have {0}, what the pattern's group matched, and {run}, the folder of the run."""

    pattern: str
    says: str
    next: str


class Found(NamedTuple):
    says: str
    next: str
    evidence: str  # "logs/ranks_0/rank_1.log:12: torch.OutOfMemoryError: CUDA out of memory"


CAUSES = (
    Cause(
        r"CUDA out of memory|torch\.OutOfMemoryError|CUDA_ERROR_OUT_OF_MEMORY|increase --mem-fraction-static",
        "a GPU ran out of memory",
        "`megarl plan --config {run}/config.yaml --search` finds layouts that fit; or set a smaller "
        "actor.ppo_max_token_len_per_gpu or actor.megatron.recompute_granularity=full, or for a server another "
        "rollout.memory_fraction",
    ),
    Cause(
        r"Bus error|/dev/shm[^\n]*No space left|No space left[^\n]*/dev/shm",
        "shared memory (/dev/shm) is too small",
        "give the container more, as with `docker run --shm-size=16g`",
    ),
    Cause(
        r"No space left on device|Disk quota exceeded|File too large",
        "a disk is full",
        "`df -h {run}` shows what is free, `megarl checkpoint prune {run} keep=1` deletes saves",
    ),
    Cause(
        r"\[Errno 13\] (Permission denied[^\n]*)",
        "a file may not be used: {0}",
        "let this user read and write what the sentence names",
    ),
    Cause(
        r"\[Errno 24\]|Too many open files",
        "a process may not open as many files as it needs",
        "raise the hard limit (`ulimit -Hn 65536` as root, or in limits.conf), or set a smaller rollout.max_in_flight",
    ),
    Cause(
        KILLED + r"[^\n)]*\)|\bMemoryError\b|Cannot allocate memory|can't allocate memory",
        "a process got no more host memory: {0}",
        "`megarl doctor` shows what is free, `megarl plan --config {run}/config.yaml` what a run takes; set a smaller "
        "data.train_batch_size, fewer ranks, servers or reward.num_workers, or take off an offload to host memory",
    ),
    Cause(
        r"(?:NonFiniteError|BadNumber|Spike): ([^\n]+)",
        "training met a bad number: {0}",
        "trainer.on_nonfinite=skip or rollback goes on without that batch; if it comes again, set a lower "
        "actor.optim.lr or look at the samples of the step in {run}/samples.jsonl",
    ),
    Cause(
        r"NCCL joins no two versions",
        "trainer and SGLang have two versions of NCCL",
        "`bash launch/gpu/install.sh` installs both environments with one",
    ),
    Cause(
        r"CUDA error: ([^\n]+)|(uncorrectable ECC error)|(device-side assert triggered)",
        "a GPU reported an error: {0}",
        "`nvidia-smi -q -d ECC` and `dmesg -T | grep -i xid` on that machine show a faulty GPU; for an assert or an "
        "illegal access start with CUDA_LAUNCH_BLOCKING=1 to see which operation it was",
    ),
    Cause(
        r"(nccl\w*Error|NCCL error[^\n]*)",
        "NCCL failed between GPUs: {0}",
        "start with NCCL_DEBUG=INFO: its lines in the logs of the ranks name the link; `megarl doctor` on each machine "
        "shows interfaces and InfiniBand ports",
    ),
    Cause(
        r"ModuleNotFoundError: No module named '([\w.]+)'",
        "the Python package {0} is missing",
        "install it in the environment of the process whose log says so; `megarl doctor` shows both environments",
    ),
    Cause(
        r"(GLIBC_[\d.]+)' not found",
        "the system is too old for a package: it lacks {0}",
        "use Debian 12, Ubuntu 22.04 or newer, or an image of launch/docker",
    ),
    Cause(
        r"(\S+\.so\S*): cannot open shared object file|Cannot load (\S+\.so\S*)",
        "a library could not be loaded: {0}",
        "`ldd` of that file shows what it lacks; reinstall the package that has it",
    ),
    Cause(
        r"(?:Segmentation fault|SIGSEGV|Fatal Python error: [^\n]+)",
        "a process crashed in compiled code",
        "the stack behind this line names the package; `megarl doctor` shows versions that were tested together",
    ),
    Cause(
        r"([Aa]ddress already in use|port is already in use)",
        "a port is taken by another process",
        "leave trainer.master_port out, so that a free one is taken, or end the run that has it",
    ),
    Cause(
        r"([^\n]*neither a folder nor a name that the hub gives[^\n]*)",
        "a model could not be found: {0}",
        "give the path of a folder; without a network download it elsewhere first",
    ),
    Cause(
        r"RewardError: ([^\n]+)|: (reward [^\n]+, sample [^\n]+)",
        "a reward failed: {0}",
        "mend the reward for the row that the sentence names, or let reward.on_error count such a sample otherwise",
    ),
    Cause(
        r"([^\n:]+ is damaged: [^\n]+)",
        "a file of a save has changed since it was written: {0}",
        "`megarl checkpoint verify {run}` names all such files; trainer.resume_mode=auto takes the save before",
    ),
    Cause(
        r"(\S+ at \S+:\d+ has blocked the event loop)",
        "code of an agent or a reward hung: {0}",
        "write `def`, which runs in a process of its own, or await an async client in that line",
    ),
    Cause(
        r"(group \S+: [^\n]+ (?:gave no sign for|did not end \w+ within) [^\n;]+)",
        "a rank hung: {0}",
        "the stack at the end of the log that the sentence names shows where; if it was at work, raise "
        "trainer.call_timeout_s or trainer.call_factor",
    ),
    Cause(
        r"(machine \d+[^\n]* is lost[^\n]*)|NodeLost: ([^\n]+)",
        "a machine was lost: {0}",
        "look at that machine; with trainer.spare_nodes=1 another one takes its place",
    ),
)  # fmt: skip

WHO_ENDED = (
    Cause(
        r"(group \S+: rank [^\n]+ died in \w+)",
        "a rank was ended from outside, and its log has no error: {0}",
        "as a rule the kernel did it because host memory ran out: `dmesg -T | grep -i 'killed process'` on that "
        "machine; then a smaller data.train_batch_size or no offload to host memory, or more memory",
    ),
    Cause(
        r"(no server is left; [^\n]+)|ServerDied: ([^\n]+)",
        "the servers ended: {0}",
        "the end of the server's log in {run}/logs has the reason; rollout.max_restarts lets it start again",
    ),
    Cause(
        r"CollectorError: ([^\n]+)",
        "the collector of completions ended: {0}",
        "the end of {run}/logs/collector.log has the reason",
    ),
)  # fmt: skip


# A warning in a log, of what one sample met and the run survived.
_TOLERATED = re.compile(r"[^\n]*; (?:it leaves its group|counted as 0|it has no audit)\b[^\n]*")


def known_cause(sources: Sequence[Source], run: str) -> Found | None:
    """What the first text names that names a cause; of several causes in it, the first of the table."""
    kept = [(s, _TOLERATED.sub("", s.text) if s.name.endswith(".log") else s.text) for s in sources]  # lines stay
    for table in (CAUSES, WHO_ENDED):
        for source, text in kept:
            for cause in table:
                if match := re.search(cause.pattern, text):
                    words = next((group for group in match.groups() if group), match.group()).strip()
                    number = text.count("\n", 0, match.start()) + 1
                    evidence = f"{source.name}:{number}: {text.splitlines()[number - 1].strip()}"
                    return Found(cause.says.format(words), cause.next.format(run=run), evidence)
    return None
