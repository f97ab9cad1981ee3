"""Runs in SGLang's environment: builds SGLang's own model classes on a CPU, and gives them what a push brings.

    python stock_models.py < cases.json

Input: a list of {"argv": [...], "meeting": FILE, "weights": FILE, "pairs": bool, "lost": NAME}.  Each model has random
weights at first; then `load_weights` of SGLang's classes gets all tensors of the safetensors file, as every update
gives them to the model and to its draft model, if the arguments ask for one; `lost`: a tensor that is not given.
`pairs`: as on a GPU, where the inputs of an indexer whose rope turns pairs are fused.  Output: for each a line of JSON,
the checksums that /weights_checker answers with, or {"error": text}.  No layer is computed: most of them have kernels
for GPUs only.

A case of {"argv": [...], "keys": [tokens, layers, K], "num_asked": N} goes through what notes and reports the keys that
indexers choose, for a prompt of N tokens and the new ones; the line has {"indexer_topk": text} of the answer.
"""

import json
import os
import sys
import traceback
from types import SimpleNamespace
from typing import Any

import torch

torch.cuda.get_device_capability = lambda *_: (9, 0)  # of which the resolution asks for models with indexers


def build(args: Any, *, draft: bool) -> Any:
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.configs.update_config import adjust_config_with_unaligned_cpu_tp
    from sglang.srt.distributed import bootstrap
    from sglang.srt.model_loader import get_model

    config = ModelConfig.from_server_args(args, is_draft_model=draft)
    bootstrap.init_layer_runtime(model_config=config)
    load_config = LoadConfig(load_format="dummy")
    config = adjust_config_with_unaligned_cpu_tp(config, load_config, 1)  # it adds what its classes read on a CPU
    return get_model(model_config=config, load_config=load_config, device_config=DeviceConfig("cpu", 0))


def fuse_pairs() -> None:
    from sglang.srt.layers.attention.dsa import dsa_indexer
    from sglang.srt.layers.rotary_embedding import get_rope
    from sglang.srt.models import deepseek_v2

    dsa_indexer._is_cuda = True
    dsa_indexer.resolve_num_sms = lambda: 132
    for module in (dsa_indexer, deepseek_v2):
        module.get_rope_wrapper = lambda *sizes, device, **others: get_rope(*sizes, **others)


def publish(case: dict[str, Any]) -> Any:
    """SGLang's arguments, settled, and the groups of one rank."""
    from sglang.srt import runtime_context
    from sglang.srt.distributed import bootstrap
    from sglang.srt.server_args import prepare_server_args

    args = prepare_server_args(case["argv"])
    args.resolve_once()
    runtime_context.publish(args, role="scheduler", ranks=runtime_context.SpawnRanks(world_rank=0))
    where = f"file://{case['meeting']}.{os.getpid()}"
    bootstrap._init_parallel_groups(backend="gloo", dist_init_method=where, server_args=args, gpu_id=0)
    return args


def reported_keys(case: dict[str, Any]) -> dict[str, str]:
    from sglang.srt.managers.detokenizer_manager import DetokenizerManager
    from sglang.srt.managers.scheduler_components.batch_result_processor import SchedulerBatchResultProcessor
    from sglang.srt.state_capturer import indexer_topk

    publish(case)
    chosen, num_asked = torch.tensor(case["keys"], dtype=torch.int32), case["num_asked"]
    tokens, layers, topk = chosen.shape
    capturer = indexer_topk.IndexerTopkCapturer(64, layers, topk, max_running_requests=2, device="cpu")
    indexer_topk.set_global_indexer_capturer(capturer)
    slots = torch.randperm(64)[:tokens]  # of its tokens in the memory of keys and values
    ends = [num_asked // 2, *range(num_asked, tokens + 1)]  # of passes: two parts of the prompt, then token by token
    for start, end in zip([0, *ends], ends, strict=False):
        for layer in range(layers):
            indexer_topk.maybe_capture_indexer_topk(layer, chosen[start:end, layer])
        batch = SimpleNamespace(out_cache_loc=slots[start:end], out_cache_loc_virtual=None)
        capturer.on_forward_end(batch, can_run_graph=False, cuda_graph_batch=None)
    pool = SimpleNamespace(req_to_token=torch.cat([slots, slots[:1]])[None])  # the last token was not read
    new = [0] * (tokens + 1 - num_asked)
    request = SimpleNamespace(
        origin_input_ids=[0] * num_asked, output_ids_through_stop=new, kv=SimpleNamespace(req_pool_idx=0)
    )
    processor = SimpleNamespace(req_to_token_pool=pool)
    SchedulerBatchResultProcessor._maybe_collect_indexer_topk(processor, request)
    return {"indexer_topk": DetokenizerManager._b64_encode_per_request([request.indexer_topk])[0]}


def checksums(case: dict[str, Any]) -> dict[str, str]:
    from safetensors.torch import load_file
    from sglang.srt.layers.moe import initialize_moe_config
    from sglang.srt.managers.scheduler_components.weight_updater import _merge_checksum_payloads
    from sglang.srt.utils.weight_checker import WeightChecker

    if case["pairs"]:
        fuse_pairs()
    args = publish(case)
    initialize_moe_config()
    models = {"target": build(args, draft=False)}
    if args.speculative_algorithm:
        models["draft"] = build(args, draft=True)
        models["draft"].set_embed_and_head(*models["target"].get_embed_and_head())
    pushed = load_file(case["weights"])
    pushed.pop(case["lost"], None)
    for model in models.values():
        model.load_weights(list(pushed.items()))
    roles = [(role, WeightChecker(get_model=lambda m=m: m).handle("checksum", role=role)) for role, m in models.items()]
    return _merge_checksum_payloads(roles)["checksums"]


def main() -> None:
    from sglang.srt.plugins import load_plugins

    load_plugins()
    for case in json.load(sys.stdin):  # each in a child: the arguments of a process are settled once
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                out = reported_keys(case) if "keys" in case else checksums(case)
            except BaseException:
                out = {"error": traceback.format_exc()}
            with os.fdopen(write, "w") as text:
                text.write(json.dumps(out))
            os._exit(0)
        os.close(write)
        with open(read) as text:
            print(text.read(), flush=True)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
