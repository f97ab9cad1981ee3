"""A plug-in of SGLang for a server with a draft model on a CPU, which gets weights and draws no token.

`torch_native` attention has no form for drafts, and keys and values of drafts are moved by a compiled kernel: SGLang
asks for both at the start and calls them when it drafts.
"""

from importlib import import_module


def setup() -> None:
    drafts = import_module("sglang.srt.speculative.draft_utils").DraftBackendFactory
    drafts.create_draft_extend_backend = lambda factory: None
    pool = import_module("sglang.srt.mem_cache.memory_pool").MHATokenToKVPool
    pool._init_kv_copy_and_warmup = lambda pool: None
