"""The command lines for GPUs, as SGLang's own code understands them on a machine with 8 H100; nothing is started."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tiny_server import CURRENT, ROOT, sglang_of
from transformers import DeepseekV3Config, GptOssConfig, Qwen2Config, Qwen3MoeConfig

from megarl.servers.launch import EngineLaunch
from megarl.servers.sglang import sglang_command

pytestmark = pytest.mark.sglang

STAND_INS = ROOT / "megarl" / "servers" / "sglang_cpu"
CONFIGS = {
    "dense": (Qwen2Config(num_hidden_layers=2), "Qwen2ForCausalLM"),
    "moe": (Qwen3MoeConfig(num_hidden_layers=2), "Qwen3MoeForCausalLM"),
    "mla": (DeepseekV3Config(num_hidden_layers=2), "DeepseekV3ForCausalLM"),
    "gpt-oss": (GptOssConfig(num_hidden_layers=2), "GptOssForCausalLM"),
}

# What holds in every case, unless the case says otherwise.
ALWAYS = {
    "device": "cuda",
    "host": "127.0.0.1",
    "dtype": "bfloat16",
    "attention_backend": "fa3",
    "sampling_backend": "flashinfer",
    "kv_cache_dtype": "auto",
    "mem_fraction_static": 0.6,
    "disable_radix_cache": False,
    "disable_shared_experts_fusion": True,
    "disable_overlap_schedule": False,
    "enable_deterministic_inference": False,
    "enable_memory_saver": False,
    "enable_return_routed_experts": False,
    "enable_fp32_lm_head": True,
    "enable_lora": None,
    "custom_weight_loader": ["megarl.weights.push.receiver.load"],
    "load_format": "auto",
    "quantization": None,
    "tp_size": 1,
    "ep_size": 1,
    "pp_size": 1,
    "dp_size": 1,
    "attn_dp_size": 1,
    "nnodes": 1,
    "base_gpu_id": 0,
    "max_running_requests": 512,
    "max_total_tokens": None,
    "skip_server_warmup": True,
    "sleep_on_idle": True,
    "watchdog_timeout": 900.0,  # 300 s for a batch, and a pause of 600 s
    "soft_watchdog_timeout": None,
    "weight_version": "7",
    "random_seed": 3,
    "decode_graphs": ("full", 256),  # backend, largest batch
    "prefill_graphs": "breakable",
    "moe_runner_backend": "triton",
}
ON_8 = {"tp_size": 8, "decode_graphs": ("full", 512)}
# name: (model, fields of EngineLaunch, what differs from ALWAYS)
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "bfloat16": ("dense", {}, {}),
    "float32": (
        "dense",
        {"dtype": "float32"},
        {"dtype": "float32", "attention_backend": "triton", "enable_fp32_lm_head": False},
    ),
    "tp8": ("dense", {"tensor_parallel_size": 8}, ON_8),
    "the second server": (
        "dense",
        {"tensor_parallel_size": 4, "index": 1},
        {"tp_size": 4, "base_gpu_id": 4, "decode_graphs": ("full", 512)},
    ),
    "two nodes": (
        "mla",
        {"tensor_parallel_size": 16, "num_machines": 2, "machine": 1, "meeting_host": "10.0.0.1", "first_gpu": 0},
        ON_8 | {"tp_size": 16, "nnodes": 2, "node_rank": 1, "dist_init_addr": "10.0.0.1:6"},
    ),
    "experts": (
        "moe",
        {"tensor_parallel_size": 8, "expert_parallel_size": 8},
        ON_8 | {"ep_size": 8, "moe_a2a_backend": "none"},
    ),
    "deterministic": (
        "dense",
        {"tensor_parallel_size": 2, "args": ("--enable-deterministic-inference",)},
        {"tp_size": 2, "enable_deterministic_inference": True, "sampling_backend": "pytorch"}
        | {"enable_fp32_lm_head": False},
    ),
    "memory saver": ("dense", {"memory_saver": True}, {"enable_memory_saver": True, "prefill_graphs": "disabled"}),
    "adapters": (
        "dense",
        {"lora_rank": 8, "lora_targets": ("q_proj", "v_proj"), "lora_slots": 3},
        {"enable_lora": True, "max_lora_rank": 8, "max_loras_per_batch": 3}
        | {"lora_target_modules": ["q_proj", "v_proj"]},
    ),
    "groups of attention": (
        "mla",
        {"tensor_parallel_size": 8, "expert_parallel_size": 8, "attention_dp": 8},
        ON_8 | {"ep_size": 8, "attn_dp_size": 8, "enable_dp_lm_head": True, "sleep_on_idle": False},
    ),
    "the experts of tokens": (
        "moe",
        {"returns_routes": True},
        {"enable_return_routed_experts": True},
    ),
    "the experts of gpt-oss": ("gpt-oss", {"returns_routes": True}, {"enable_return_routed_experts": True}),
    "fp8": ("moe", {"quantization": "fp8"}, {"quantization": "fp8", "load_format": "flash_rl"}),
    "random weights": ("dense", {"reads_weights": False}, {"load_format": "dummy"}),
    "random weights in fp8": (
        "moe",
        {"reads_weights": False, "quantization": "fp8"},
        {"quantization": "fp8", "load_format": "flash_rl"},
    ),
    "a long pause": ("dense", {"longest_pause_s": 3600.0}, {"watchdog_timeout": 3900.0}),
    "SGLang's own share of memory": ("dense", {"memory_fraction": None}, {"mem_fraction_static": 0.83}),
}


@pytest.fixture(scope="module")
def resolved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What SGLang makes of each case.  One process for all: its imports take most of the time."""
    folder = tmp_path_factory.mktemp("flags")
    for name, (config, architecture) in CONFIGS.items():
        config.architectures = [architecture]
        config.save_pretrained(folder / name)
    inputs, environment = [], {}
    usual = {"port": 5, "group_port": 6, "python": sglang_of(CURRENT), "device": "cuda", "dtype": "bfloat16"}
    usual |= {"memory_fraction": 0.6, "weight_version": 7, "random_seed": 3}
    for number, (model, fields, _) in enumerate(CASES.values()):
        own = folder / str(number)
        own.mkdir()
        launch = EngineLaunch("sglang", str(folder / model), **(usual | fields))
        command = sglang_command(launch, own)
        assert command.argv[1:3] == ["-m", "megarl.servers.sglang_server"]  # argv[3] is the parent
        environment = command.environment | {"PYTHONPATH": f"{command.environment['PYTHONPATH']}:{STAND_INS}"}
        variables = {name: value for name, value in command.environment.items() if name.startswith("SGLANG_")}
        inputs.append({"argv": command.argv[4:], "environment": variables})
    script = Path(__file__).parents[1] / "helpers" / "resolved_server_args.py"
    done = subprocess.run(
        [sglang_of(CURRENT), str(script), "H100"],
        input=json.dumps(inputs),
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    *answers, _ = map(json.loads, done.stdout.splitlines())
    return dict(zip(CASES, answers, strict=True))


@pytest.mark.parametrize("case", CASES)
def test_sglang_flags_mean_what_we_rely_on(resolved: dict[str, dict[str, Any]], case: str) -> None:
    answer, wanted = resolved[case], ALWAYS | CASES[case][2]
    assert "error" not in answer, answer["error"]
    found = answer["args"]
    graphs = found["cuda_graph_config"]["decode"]
    found["decode_graphs"] = graphs["backend"], graphs["max_bs"]
    found["prefill_graphs"] = found["cuda_graph_config"]["prefill"]["backend"]
    assert {name: found[name] for name in wanted} == wanted


@pytest.mark.parametrize(
    ("case", "wanted"),
    [
        ("bfloat16", {}),
        ("tp8", {"NCCL_GRAPH_REGISTER": "0"}),
        (
            "deterministic",
            {"NCCL_GRAPH_REGISTER": "0", "NCCL_ALGO": "allreduce:tree"}
            | {"NCCL_MIN_NCHANNELS": "8", "NCCL_MAX_NCHANNELS": "8"},
        ),
    ],
)
def test_sglang_flags_set_these_variables_of_nccl(
    resolved: dict[str, dict[str, Any]], case: str, wanted: dict[str, str]
) -> None:
    """They act on the server's side of a weight group too, not on the trainer's."""
    found = resolved[case]["environment"]
    assert {name: value for name, value in found.items() if name.startswith("NCCL")} == wanted
