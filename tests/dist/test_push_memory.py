"""How much memory a push takes beside the model, on both sides: the kernel's own high-water mark of each process."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from push_cases import HFServer, build, connect, push
from spawn import Ranks
from tiny_models import write_model

from megarl.arch.layout import Layout

pytestmark = [pytest.mark.full, pytest.mark.dist]

MB = 1 << 20
BUCKET = 8 * MB  # four times the largest tensor
MODEL = 100 * MB
# Beside buckets: threads' stacks, buffers of HTTP, pages that Python and the allocator take.
NOISE = 6 * MB


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 2048, "num_hidden_layers": 14}
    return write_model(tmp_path_factory.mktemp("model"), "qwen2", tied=False, **sizes)


@pytest.fixture(scope="module")
def running(folder: Path) -> Iterator[tuple[Ranks, list[HFServer]]]:
    # Else the allocator keeps freed blocks of up to 32 MB, and what is taken from these would not be seen.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")
        with HFServer(folder) as first, HFServer(folder) as second, Ranks(2) as ranks:
            ranks.run(build, str(folder), Layout(tp=2), timeout_s=240)
            yield ranks, [first.wait(), second.wait()]


def resident(pid: int, field: str) -> int:
    """Bytes; VmRSS now, VmHWM at most since `forget`."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def forget(pid: int) -> None:
    Path(f"/proc/{pid}/clear_refs").write_text("5")


@pytest.mark.parametrize(
    ("transport", "sender_buckets"),
    # Two buckets, each half as large; of gathering, twice as much as goes into one and this rank's half of that.
    # Slices: two messages, which are together as large as a bucket; shared also two that this rank receives.
    [("gathered", 1 + 1.5), ("mapped", 1 + 1.5), ("shared", 1 + 1), ("sharded", 1)],
)
def test_a_push_takes_a_few_buckets_and_no_copy_of_the_model(
    transport: str, sender_buckets: float, running: tuple[Ranks, list[HFServer]]
) -> None:
    ranks, servers = running
    ranks.run(connect, [server.url for server in servers], transport, {"bucket_bytes": BUCKET}, timeout_s=120)
    ranks.run(push, 1, "", {"bare": True}, timeout_s=240)
    pids = [*ranks.run(os.getpid), *(server.pid for server in servers)]
    before = [resident(pid, "VmRSS") for pid in pids]
    for pid in pids:
        forget(pid)
    report = ranks.run(push, 2, "", {"bare": True}, timeout_s=240)[0]["report"]
    assert report.num_bytes > 0.9 * MODEL
    taken = [resident(pid, "VmHWM") - start for pid, start in zip(pids, before, strict=True)]
    assert report.transports == {server.url: transport for server in servers}
    assert max(taken[:2]) <= sender_buckets * BUCKET + NOISE
    assert max(taken[2:]) <= BUCKET + NOISE
