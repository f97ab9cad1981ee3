"""How SGLang is started: its command line, its environment, and the modules that stand in for GPU packages."""

import logging
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

import megarl
from megarl.servers.launch import EngineLaunch
from megarl.servers.router import smg_command
from megarl.servers.sglang import sglang_command
from megarl.servers.sglang_environment import PYTHON_VARIABLE, preload_faults, sglang_python, with_cuda_libraries
from megarl.servers.sglang_server import hide_in_logs

STAND_INS = Path(megarl.__file__).parent / "servers" / "sglang_cpu"


@pytest.fixture
def make(tmp_path, monkeypatch):
    """The command of a launch with these fields, on a machine with cores 2, 3 and 5."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {2, 3, 5})

    def command(**fields):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        fields = {"port": 5, "group_port": 6, "python": sys.executable, "device": "cpu", **fields}
        return sglang_command(EngineLaunch("sglang", "/m", **fields), folder)

    return command


def option(command, flag):
    return command.argv[command.argv.index(flag) + 1]


def test_a_server_without_gpu_has_its_recipe(make):
    command = make(weight_version=3, random_seed=8, max_running_requests=9)
    assert command.argv[:4] == [sys.executable, "-m", "megarl.servers.sglang_server", str(os.getpid())]
    wanted = {"--device": "cpu", "--attention-backend": "torch_native", "--dtype": "float32", "--model-path": "/m"}
    wanted |= {"--port": "5", "--nccl-port": "6", "--weight-version": "3", "--random-seed": "8"}
    wanted |= {"--max-running-requests": "9", "--custom-weight-loader": "megarl.weights.push.receiver.load"}
    assert {flag: option(command, flag) for flag in wanted} == wanted
    assert "--skip-server-warmup" in command.argv and "--sleep-on-idle" in command.argv
    assert command.environment["SGLANG_USE_CPU_ENGINE"] == command.environment["OMP_NUM_THREADS"] == "1"
    assert str(STAND_INS) in command.environment["PYTHONPATH"].split(":")


BF16 = {"device": "cuda", "dtype": "bfloat16"}
CASES = {
    "weights that are read": ({}, "", ["--load-format"]),
    "weights that are pushed": ({"reads_weights": False}, "--load-format dummy", []),
    "a limit of the KV cache without GPU": ({}, "--max-total-tokens 65536", []),
    "one of the user": ({"max_total_tokens": 9}, "--max-total-tokens 9", []),
    "GPUs": (
        {"device": "cuda", "index": 1, "tensor_parallel_size": 2, "memory_fraction": 0.5},
        "--base-gpu-id 2 --mem-fraction-static 0.5",
        ["--device", "--max-total-tokens"],
    ),
    "the first GPU": ({"device": "cuda", "first_gpu": 5}, "--base-gpu-id 5", []),
    # Prompts are computed without a graph, which could not be captured there.
    "memory that is released": (
        BF16 | {"memory_saver": True},
        "--enable-memory-saver --disable-prefill-cuda-graph",
        [],
    ),
    "memory that is kept": (BF16, "", ["--enable-memory-saver", "--disable-prefill-cuda-graph"]),
    # Experts keep the layout in which they are pushed.
    "experts on a GPU": (BF16, "--moe-runner-backend triton", []),
    "experts of the user's choice": (
        BF16 | {"args": ("--moe-runner-backend", "auto")},
        "--moe-runner-backend triton --enable-fp32-lm-head --moe-runner-backend auto",
        [],
    ),
    "memory without GPU": ({"memory_saver": True}, "", ["--enable-memory-saver"]),
    # Attention groups have the head to themselves.
    "attention groups": (
        {"tensor_parallel_size": 4, "attention_dp": 2},
        "--attn-dp-size 2 --enable-dp-lm-head",
        ["--sleep-on-idle"],
    ),
    "one group": ({"tensor_parallel_size": 4}, "", ["--attn-dp-size", "--enable-dp-lm-head"]),
    # It loads so that it can quantize again.
    "quantized": (BF16 | {"quantization": "fp8"}, "--quantization fp8 --load-format flash_rl", []),
    "not quantized": (BF16, "", ["--quantization", "--load-format", "--attention-backend"]),
    # An attention that computes in float32.
    "float32 on a GPU": ({"device": "cuda"}, "--attention-backend triton", ["--enable-fp32-lm-head"]),
    # Logits are not rounded to 16 bits.
    "bfloat16 on a GPU": (BF16, "--enable-fp32-lm-head", []),
    "bfloat16 without GPU": ({"dtype": "bfloat16"}, "", ["--enable-fp32-lm-head"]),
    "deterministic": (BF16 | {"args": ("--enable-deterministic-inference",)}, "", ["--enable-fp32-lm-head"]),
    # An idle server leaves its core to others.
    "idle on a GPU": (BF16, "--sleep-on-idle", []),
    # SGLang's watchdog does not stop during a pause in place.
    "a long pause": ({"longest_pause_s": 1000.0}, "--watchdog-timeout 1300.0", []),
    "arguments of the user": ({"args": ("--dtype", "bfloat16")}, " --dtype bfloat16", []),  # the last, and so they win
    "adapters": (
        {"lora_rank": 8, "lora_targets": ("q_proj", "v_proj"), "lora_slots": 3},
        "--max-lora-rank 8 --max-loras-per-batch 3 --enable-lora --lora-target-modules q_proj v_proj "
        "--lora-backend torch_native",
        [],
    ),
    "no adapters": ({}, "", ["--enable-lora", "--max-lora-rank"]),
    "states without GPU": (
        {"has_states": True, "max_running_requests": 3},
        "torch_native --disable-overlap-schedule --max-mamba-cache-size 12",
        [],
    ),
    "states on a GPU": (BF16 | {"has_states": True}, "", ["--disable-overlap-schedule", "--max-mamba-cache-size"]),
    "what SGLang misreads": ({"overrides": '{"a": 1}'}, '--json-model-override-args {"a": 1}', []),
    "what SGLang reads": ({}, "", ["--json-model-override-args", "--disable-overlap-schedule"]),
}


@pytest.mark.parametrize("case", CASES)
def test_fields_of_a_launch_become_options(make, case):
    fields, wanted, missing = CASES[case]
    argv = make(**fields).argv
    assert wanted in " ".join(argv)
    assert not set(missing) & set(argv)
    assert "args" not in fields or tuple(argv[-len(fields["args"]) :]) == fields["args"]


def test_each_rank_of_each_server_has_a_core(make):
    cores = [make(index=index, tensor_parallel_size=2).environment["SGLANG_CPU_OMP_THREADS_BIND"] for index in range(3)]
    assert cores == ["2|3", "5|2", "3|5"]
    assert make(tensor_parallel_size=2).environment["TORCHDYNAMO_DISABLE"] == "1"
    assert "TORCHDYNAMO_DISABLE" not in make().environment


def test_the_environment_of_a_server_on_gpus_has_nothing_of_that(make):
    environment = make(**BF16, memory_saver=True).environment
    assert environment["SGLANG_MEMORY_SAVER_CUDA_GRAPH"] == environment["NVSHMEM_DISABLE_NCCL"] == "1"
    assert environment["SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"] == "0"
    # The check stays on in tests on CPUs, which it may fail.
    assert not {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE", "LD_LIBRARY_PATH"} & set(make().environment)
    assert not {"SGLANG_USE_CPU_ENGINE", "SGLANG_CPU_OMP_THREADS_BIND"} & set(environment)
    assert "sglang_cpu" not in environment["PYTHONPATH"]


def test_inputs_of_convolutions_are_kept_in_the_type_of_the_weights(make, monkeypatch):
    name = "SGLANG_MAMBA_CONV_DTYPE"
    assert name not in make().environment
    for device in ("cpu", "cuda"):
        assert make(has_states=True, device=device).environment[name] == "float32"
    monkeypatch.setenv(name, "bfloat16")
    assert make(has_states=True).environment[name] == "bfloat16"


def test_a_users_choice_of_a_variable_is_kept(make, monkeypatch):
    chosen = {"SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "1", "NCCL_CUMEM_ENABLE": "1", "LD_LIBRARY_PATH": "/cuda"}
    for name, value in chosen.items():
        monkeypatch.setenv(name, value)
    environment = make(**BF16).environment
    assert environment | chosen == environment
    assert environment["NCCL_NVLS_ENABLE"] == make().environment["NCCL_NVLS_ENABLE"] == "0"


def test_what_the_preloaded_library_wants_is_looked_for_among_pips_wheels(tmp_path):
    """A real library stands for that of the memory saver: of torch, which wants others of torch."""
    python, packages = tmp_path / "bin/python", tmp_path / "lib/python3.11/site-packages"
    packages.mkdir(parents=True)
    assert preload_faults(python) == ["torch_memory_saver for cu13"]
    shutil.copy(torch._C.__file__, packages / "torch_memory_saver_hook_mode_preload_cu13.abi3.so")
    assert preload_faults(python) == ["libtorch_python.so"]
    (packages / "nvidia/cu13").mkdir(parents=True)
    (packages / "nvidia/cu13/lib").symlink_to(Path(torch.__file__).parent / "lib")
    assert preload_faults(python) == []
    folder = str(packages / "nvidia/cu13/lib")
    assert with_cuda_libraries(python, {"LD_LIBRARY_PATH": "/cuda"}) == {"LD_LIBRARY_PATH": f"/cuda:{folder}"}


@pytest.mark.long
def test_the_locked_memory_saver_wants_the_locked_cuda_runtime(tmp_path):
    """The wheels of launch/gpu/server.txt; the driver's library is the machine's."""
    packages = tmp_path / "lib/python3.11/site-packages"
    locked = (Path(megarl.__file__).parents[1] / "launch/gpu/server.txt").read_text()
    pins = [
        re.search(rf"^{name}==\S+", locked, re.MULTILINE)[0] for name in ("torch-memory-saver", "nvidia-cuda-runtime")
    ]
    subprocess.run([sys.executable, "-m", "pip", "download", "--no-deps", "--dest", tmp_path, *pins], check=True)
    for wheel in tmp_path.glob("*.whl"):
        zipfile.ZipFile(wheel).extractall(packages)
    python, (library,) = tmp_path / "bin/python", packages.glob("torch_memory_saver_hook_mode_preload_cu13.*")
    assert set(preload_faults(python)) <= {"libcuda.so.1"}
    told = subprocess.check_output(["ldd", library], env=with_cuda_libraries(python, os.environ), text=True)
    assert f"libcudart.so.13 => {packages}/nvidia/cu13/lib/libcudart.so.13" in told


def test_nothing_of_the_trainers_environment_leaks(make, tmp_path, monkeypatch):
    ours = ["VIRTUAL_ENV", "RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RUN_ID", "PYTORCH_ALLOC_CONF"]
    for name in (*ours, "PYTHONHOME", "PYTHONPATH"):
        monkeypatch.setenv(name, "/trainer")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.setenv("no_proxy", "example.org")
    environment = make(host="10.0.0.1").environment
    assert "/trainer" not in " ".join(environment.values())
    assert environment["CUDA_VISIBLE_DEVICES"] == "3"
    assert environment["no_proxy"] == environment["NO_PROXY"] == "example.org,127.0.0.1,localhost,10.0.0.1"
    assert environment["PATH"].startswith(str(Path(sys.executable).parent))
    assert "MEGARL_SERVER_TOKEN" not in environment
    assert Path(environment["TMPDIR"]).parent.parent == tmp_path and Path(environment["TMPDIR"]).is_dir()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_server_can_import_this_package_and_its_plugins(make, device):
    code = """
import megarl, sys
from importlib.metadata import entry_points
print(megarl.__path__[0])
print(sorted(f"{e.name} {e.value}" for e in entry_points(group="sglang.srt.plugins")))
"""
    environment = make(device=device).environment
    out = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    path, plugins = out.stdout.splitlines()
    assert path.startswith(environment["PYTHONPATH"].split(":")[0])
    assert Path(path).resolve() == Path(megarl.__file__).resolve().parent
    wanted = ["megarl megarl.weights.push.receiver:setup"]
    wanted += ["megarl_cpu megarl_cpu_plugin:setup"] if device == "cpu" else []
    assert plugins == str(wanted)


def test_the_router_shows_itself_on_its_own_interface_only(tmp_path):
    launch = EngineLaunch("smg", "", port=5, group_port=6, python=sys.executable)
    command = smg_command(launch, tmp_path)
    assert option(command, "--host") == option(command, "--prometheus-host") == "127.0.0.1"
    assert not any("api-key" in word for word in command.argv)


def test_python_is_the_configured_one_or_the_variables_or_the_default(tmp_path, monkeypatch):
    python = tmp_path / ".venv-sglang/bin/python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(PYTHON_VARIABLE, raising=False)
    assert sglang_python(None) == python
    monkeypatch.setenv(PYTHON_VARIABLE, sys.executable)
    assert sglang_python(None) == Path(sys.executable)
    assert sglang_python(".venv-sglang/bin/python") == python


@pytest.mark.parametrize("configured", ["/nowhere/python", "/", None])
def test_a_missing_python_is_one_sentence(configured, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(PYTHON_VARIABLE, raising=False)
    with pytest.raises(ValueError, match=r"no Python there.*bash launch/sglang_cpu\.sh.*rollout\.sglang\.python$"):
        sglang_python(configured)


def test_the_token_shows_as_stars_in_the_log(monkeypatch, caplog):
    monkeypatch.setattr(logging, "_logRecordFactory", logging.getLogRecordFactory())  # handed back afterwards
    hide_in_logs("swordfish")
    logger = logging.getLogger("some.server")
    logger.warning("api_key=%r and %s", "swordfish", "more")
    logger.warning("%s - %d", "an access", 200)
    assert [record.getMessage() for record in caplog.records] == ["api_key='***' and more", "an access - 200"]
    assert caplog.records[1].args == ("an access", 200)


STAND_IN_USE = """
import triton, triton.language as tl, torchvision, sgl_kernel, torch
from triton.language.extra.cuda import libdevice
from triton.runtime.jit import JITFunction
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional
from torchvision.io import ImageReadMode, decode_image
from sgl_kernel import anything

@triton.jit
def kernel(x, n: tl.constexpr): return x + n

@triton.autotune(configs=[triton.Config({}, num_warps=4)], key=["n"])
@triton.jit(do_not_specialize=["n"])
def other(x): return x

assert kernel(1, 2) == 3 and other(4) == 4
assert (triton.cdiv(7, 2), triton.next_power_of_2(5), triton.next_power_of_2(0)) == (4, 8, 1)
assert not triton.backends.backends and tl.constexpr(3).value == 3 and isinstance(JITFunction(kernel), JITFunction)
assert InterpolationMode.BICUBIC.value == "bicubic" and ImageReadMode.RGB.value == 3
for call in (lambda: kernel[(1,)](1, 2), lambda: anything(1), lambda: functional.resize(1), lambda: decode_image(1)):
    try:
        call()
    except (TypeError, NotImplementedError):
        continue
    raise AssertionError("a stand-in did work")
from sgl_kernel.mamba import chunk_gated_delta_rule_cpu
assert torch.ops.sgl_kernel.fused_gdn_gating_cpu(*torch.zeros(4, 1, 1))[1] == 0.5, "the one that does work"
print("all refused")
"""


def test_stand_ins_can_be_imported_and_do_no_work():
    environment = {**os.environ, "PYTHONPATH": str(STAND_INS)}
    done = subprocess.run([sys.executable, "-c", STAND_IN_USE], env=environment, check=True, capture_output=True)
    assert done.stdout == b"all refused\n"
