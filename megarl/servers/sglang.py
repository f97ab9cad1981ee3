"""Stock SGLang as an engine: its command line and its environment, on a machine with or without GPUs.

SGLang has its own Python environment (`sglang_environment`; launch/sglang_cpu.sh makes one for a machine without GPU)
and is started through `sglang_server`. It loads `weights.push.receiver` as a plug-in and as a custom weight loader.

Without a GPU SGLang runs with its `torch_native` attention backend, but still imports GPU packages: the modules of
the folder `sglang_cpu` replace these.
"""

from __future__ import annotations

import os
from pathlib import Path

from megarl.arch.sglang_config import OVERRIDE
from megarl.servers.launch import RETURNS_KEYS, RETURNS_ROUTES, WEIGHT_LOADER, EngineLaunch, ServerCommand, flags
from megarl.servers.sglang_environment import foreign_environment, sglang_python, with_cuda_libraries

_PLUGINS = "[sglang.srt.plugins]\nmegarl = megarl.weights.push.receiver:setup\n"
_CPU_PLUGIN = "megarl_cpu = megarl_cpu_plugin:setup\n"
_STAND_INS = Path(__file__).parent / "sglang_cpu"
_CPU_TOKENS = 65536  # SGLang's default takes most of the machine's memory
_CPU_STATES = 4  # for each running completion: SGLang needs three; by default they too take most of the memory
_DETERMINISTIC = "--enable-deterministic-inference"
_BATCH_S = 300.0  # SGLang's own limit for one batch

# Options of servers on GPUs, unless the user has set them.
_ON_GPUS = {
    # SGLang refuses to start where the free memory of its GPUs differs by a tenth, as it does for a server that is
    # started again beside a trainer whose ranks hold unequal parts.
    "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0",
    # An idle scheduler ends itself where its count of free tokens is off by one, which costs a run more than the token;
    # now it warns in its log.
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "0",
    # NVSHMEM, which DeepEP uses, would make communicators of NCCL of its own.
    "NVSHMEM_DISABLE_NCCL": "1",
    # SGLang would compile DeepGEMM's products for each of 16384 batch sizes before it serves; it compiles those that
    # occur.  All servers of a user keep them in one folder, which SGLang locks.
    "SGLANG_JIT_DEEPGEMM_PRECOMPILE": "0",
}


def sglang_command(launch: EngineLaunch, folder: Path) -> ServerCommand:
    """The command of one SGLang server, which ends when this process ends; its temporary files go into `folder`.

    Raises ValueError if there is no Python of SGLang's environment at the expected path.
    """
    python, on_cpu = sglang_python(launch.python), launch.uses_cpu
    options: dict[str, object] = {
        "--model-path": launch.model_path,
        "--host": launch.host,
        "--port": launch.port,
        "--nccl-port": launch.group_port if launch.num_machines == 1 else None,
        "--dtype": launch.dtype,
        "--tp-size": launch.tensor_parallel_size,
        "--ep-size": launch.expert_parallel_size if launch.expert_parallel_size > 1 else None,
        "--max-running-requests": launch.max_running_requests,
        "--max-total-tokens": launch.max_total_tokens or (_CPU_TOKENS if on_cpu else None),
        "--random-seed": launch.random_seed,
        "--weight-version": launch.weight_version,
        OVERRIDE: launch.overrides or None,
        "--custom-weight-loader": WEIGHT_LOADER,
        "--log-level-http": "warning",  # otherwise it logs a line for every request
        # SGLang ends itself if a batch takes longer, and it counts the time of a pause in place as part of the batch.
        "--watchdog-timeout": _BATCH_S + launch.longest_pause_s,
    }
    argv = [str(python), "-m", "megarl.servers.sglang_server", str(os.getpid()), "--skip-server-warmup"]
    returns_keys = launch.returns_routes and launch.has_indexers
    argv += [RETURNS_ROUTES] * launch.returns_routes + [RETURNS_KEYS] * returns_keys
    assert not launch.scores, "a reward model runs on our own server"
    argv += (
        flags(options)
        + _attention_groups(launch)
        + _weights(launch)
        + _quantization(launch)
        + _machines(launch)
        + (_cpu_options(launch) if on_cpu else _gpu_options(launch))
        + _lora(launch, on_cpu)
    )
    environment = foreign_environment(
        python,
        folder,
        launch.host,
        path=[_STAND_INS] if on_cpu else [],
        plugins=_PLUGINS + (_CPU_PLUGIN if on_cpu else ""),
    )
    environment["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] = "0"  # otherwise a health check generates a token
    environment["SGLANG_REQUEST_STATE_WAIT_TIMEOUT"] = "1"  # s until it notices a client's disconnect; default 4
    for dump in ("PYSPY_DUMP", "CUDA_COREDUMP"):  # otherwise a crashed server hangs for up to a minute
        environment[f"SGLANG_{dump}_BEFORE_CRASH"] = "0"
    if launch.has_states:  # otherwise the inputs of a convolution that the next token needs are kept in bfloat16
        environment = {"SGLANG_MAMBA_CONV_DTYPE": launch.dtype} | environment
    if returns_keys:  # otherwise it reports where it has the keys in its memory, not their positions
        environment["SGLANG_DSA_FUSE_TOPK"] = "0"
    environment |= _cpu_environment(launch) if on_cpu else with_cuda_libraries(python, _ON_GPUS | environment)
    if launch.memory_saver and not on_cpu:  # otherwise CUDA graphs stay on the GPU when the server releases its memory
        environment["SGLANG_MEMORY_SAVER_CUDA_GRAPH"] = "1"
    return ServerCommand([*argv, *launch.args], environment)


def _attention_groups(launch: EngineLaunch) -> list[str]:
    """The options of attention data parallelism.

    --attn-dp-size N is SGLang 0.5.23's name of `--enable-dp-attention --dp-size N`, which it deprecates.  With
    --enable-dp-lm-head each group computes the logits of its own requests; otherwise SGLang gathers the hidden states
    and logits of all groups on every rank, [running completions, vocabulary] numbers in each step.  The head is then
    whole in each group, like the embedding.  --moe-dense-tp-size stays unset: dense layers and shared experts divide by
    the tensor-parallel size (config/validate/servers.py checks it), and whole copies of them would take memory.

    With --sleep-on-idle each scheduler sleeps for up to a second on its own sockets, and an order to the server reaches
    those of the first group only: with more than one group begin and end of an update, or a flush, take seconds.
    """
    if launch.attention_dp == 1:
        return ["--sleep-on-idle"]  # an idle scheduler would poll without pause, and the trainer needs the core
    return [*flags({"--attn-dp-size": launch.attention_dp}), "--enable-dp-lm-head"]


def _quantization(launch: EngineLaunch) -> list[str]:
    """The options of a server that quantizes bfloat16 weights when it loads them, at each push again.

    With SGLang's other load formats a second load fails: the first one replaces each bfloat16 parameter by a transposed
    fp8 tensor without a loader (Fp8LinearMethod.process_weights_after_loading), and nothing restores it before an
    update.  The loader of flash_rl stages each layer in bfloat16 and quantizes it into its fp8 tensor and scales
    (QuantizedRLModelLoader), for /update_weights_from_distributed, _from_tensor and _from_disk alike.
    """
    return [] if launch.quantization == "none" else ["--quantization", launch.quantization, "--load-format", "flash_rl"]


def _weights(launch: EngineLaunch) -> list[str]:
    """Random weights for a server that gets all of them before its first request: nothing is read from disk."""
    return [] if launch.reads_weights else ["--load-format", "dummy"]


def _machines(launch: EngineLaunch) -> list[str]:
    """The options of a server whose ranks are on several machines."""
    if launch.num_machines == 1:
        return []
    meeting = f"{launch.meeting_host}:{launch.group_port}"
    return flags({"--nnodes": launch.num_machines, "--node-rank": launch.machine, "--dist-init-addr": meeting})


def _cpu_options(launch: EngineLaunch) -> list[str]:
    options = ["--device", "cpu", "--attention-backend", "torch_native"]
    if launch.has_states:
        # For overlapped batches SGLang would keep copies of states, which it has kernels for on GPUs only.
        options.append("--disable-overlap-schedule")
        options += flags({"--max-mamba-cache-size": _CPU_STATES * launch.max_running_requests})
    return options


def _gpu_options(launch: EngineLaunch) -> list[str]:
    out = flags({"--base-gpu-id": launch.gpu, "--mem-fraction-static": launch.memory_fraction})
    # With fusion the shared expert becomes one more routed expert, which the weight tables do not know.
    out.append("--disable-shared-experts-fusion")
    # On Blackwell SGLang would take TensorRT-LLM's kernels, for which it lays the experts' weights out anew after each
    # load: what is held is then not what was pushed.  For gpt-oss it would take kernels that report no experts.
    out += ["--moe-runner-backend", "triton"]
    if launch.dtype == "float32":  # SGLang's default on Hopper, FlashAttention 3, takes 16-bit types only
        out += ["--attention-backend", "triton"]
    elif _DETERMINISTIC not in launch.args:
        # As in the trainer (mcore/logprobs/fused.py), logits are not rounded to 16 bits: log-probs would differ more.
        # SGLang's product in float32 into a given buffer is not among those that it makes deterministic.
        out.append("--enable-fp32-lm-head")
    if launch.memory_saver:
        # The graphs that SGLang would use for prompts cannot be captured in memory that is released: it ends at the
        # start (BreakableCudaGraphBackend).  Prompts are then computed without a graph; decoding keeps its graphs.
        out += ["--enable-memory-saver", "--disable-prefill-cuda-graph"]
    return out


def _lora(launch: EngineLaunch, on_cpu: bool) -> list[str]:
    if launch.lora_rank == 0:
        return []
    # SGLang allocates memory for so many adapters of all targets when it starts.
    options = flags({"--max-lora-rank": launch.lora_rank, "--max-loras-per-batch": launch.lora_slots})
    options.append("--enable-lora")
    options += ["--lora-target-modules", *launch.lora_targets]
    return [*options, "--lora-backend", "torch_native"] if on_cpu else options


def _cpu_environment(launch: EngineLaunch) -> dict[str, str]:
    """One core for each tensor-parallel rank of each server; with fewer cores, ranks share them round-robin."""
    cores, size = sorted(os.sched_getaffinity(0)), launch.tensor_parallel_size
    mine = [cores[(launch.index * size + rank) % len(cores)] for rank in range(size)]
    out = {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"}
    out["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(map(str, mine))
    if size > 1:  # otherwise SGLang compiles its collectives, which needs Triton
        out["TORCHDYNAMO_DISABLE"] = "1"
    return out
