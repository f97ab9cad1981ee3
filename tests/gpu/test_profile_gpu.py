"""On a real GPU: a trace with kernels, the memory's history, and ranges for Nsight Systems."""

from pathlib import Path

import pytest
import torch
from torch.profiler import record_function
from traces import events_of

from megarl.roles.profiler import RankProfiler

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("one_gpu")]


@pytest.mark.parametrize("tool", ["torch", "nvtx"])
def test_a_profile_has_kernels_and_the_memorys_history(tool: str, tmp_path: Path) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    profiler, a = RankProfiler(device), torch.ones(256, 256, device=device)
    profiler.start(tool, memory=True)
    with record_function("update actor"):
        a @ a
    *traces, memory = profiler.stop(tmp_path / "rank_0")
    assert Path(memory).stat().st_size > 0
    if tool == "torch":
        assert any(event.get("cat") == "kernel" for event in events_of(traces[0]))
