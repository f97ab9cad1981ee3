"""What is measured: models made on the spot, trainers and servers of several layouts, and what each server must get."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, Qwen3Config
from transformers.utils import logging

from megarl.arch.boxes import box_size
from megarl.arch.layout import Layout
from megarl.data.examples.tiny import tiny_tokenizer
from megarl.weights.mapping.server_map import server_table
from megarl.weights.reshard.sharding import ServerSharding

Engine = Literal["hf", "sglang"]
TRANSPORTS = ("gathered", "mapped", "shared", "sharded")


@dataclass(frozen=True)
class Size:
    """A Qwen3 with random weights."""

    name: str
    hidden: int
    layers: int
    heads: int  # of 64 each, two for every key-value head
    ffn: int
    vocab: int

    def write(self, folder: Path, dtype: str) -> Path:
        """As an ordinary Hugging Face folder."""
        tokenizer = tiny_tokenizer()
        config = Qwen3Config(
            hidden_size=self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.heads // 2,
            head_dim=64,
            intermediate_size=self.ffn,
            vocab_size=self.vocab,
            max_position_embeddings=2048,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
        model.generation_config = GenerationConfig(eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id)
        logging.disable_progress_bar()
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return folder


SIZES = {
    size.name: size
    for size in (
        Size("1M", 128, 4, 4, 384, 1024),
        Size("34M", 512, 8, 8, 1536, 8192),
        Size("134M", 1024, 8, 16, 3072, 16384),
        Size("1.5B", 2048, 24, 32, 6144, 65536),
        Size("7B", 4096, 32, 64, 12288, 131072),
    )
}


@dataclass(frozen=True)
class ServerSet:
    """Servers of one kind: `replicas` of `tp` ranks each."""

    engine: Engine
    size: str
    tp: int = 1
    replicas: int = 1

    def __str__(self) -> str:
        return f"{self.engine} tp{self.tp} x{self.replicas}"


@dataclass(frozen=True)
class Case:
    """One row for each transport."""

    servers: ServerSet
    trainer: Layout = Layout()  # tp, pp; the rest of the ranks is dp

    def trainer_words(self, num_ranks: int) -> str:
        tp, pp = self.trainer.tp, self.trainer.pp
        return f"tp{tp} pp{pp} dp{num_ranks // (tp * pp)}"


def cpu_cases() -> list[Case]:
    """Two ranks on a machine without GPU; the smallest and most telling first, should the time not last."""
    tp, pp, dp = Layout(tp=2), Layout(pp=2), Layout()
    return [
        *(Case(ServerSet("hf", "34M"), layout) for layout in (tp, pp, dp)),
        *(Case(ServerSet("sglang", "34M"), layout) for layout in (tp, pp)),
        Case(ServerSet("sglang", "34M", tp=2), tp),
        Case(ServerSet("hf", "134M"), tp),
        Case(ServerSet("sglang", "134M"), tp),
        Case(ServerSet("hf", "34M", replicas=2), tp),
        Case(ServerSet("hf", "1M"), tp),
    ]


def cpu_cases_of_8() -> list[Case]:
    """Eight ranks without GPUs, each with an eighth of the model: what gathering costs grows with them."""
    return [Case(ServerSet("sglang", size, tp=4), Layout(tp=4, pp=2)) for size in ("34M", "134M")]


def gpu_cases(num_ranks: int) -> list[Case]:
    """`num_ranks` GPUs train; the servers have the others, or share the only one."""
    layouts = [Layout(tp=num_ranks)] + ([Layout(), Layout(pp=2)] if num_ranks > 1 else [])
    found = [Case(ServerSet("hf", "1.5B"), layout) for layout in layouts]
    found += [Case(ServerSet("sglang", size), layout) for size in ("1.5B", "7B") for layout in layouts]
    return found + ([Case(ServerSet("sglang", "7B", tp=num_ranks), layouts[0])] if num_ranks > 1 else [])


def quick_cases(num_ranks: int) -> list[Case]:
    """Whether everything still goes through, not how fast."""
    layout = Layout(tp=min(2, num_ranks))
    return [Case(ServerSet("hf", "1M"), layout), Case(ServerSet("sglang", "1M"), layout)]


def by_servers(cases: list[Case]) -> Iterator[tuple[ServerSet, list[Case]]]:
    """Cases that the same server processes can serve, in the order of the first of each."""
    for servers in dict.fromkeys(case.servers for case in cases):
        yield servers, [case for case in cases if case.servers == servers]


def useful_bytes(folder: Path, servers: ServerSet, dtype: str) -> int:
    """What must reach the servers: the bytes of each rank's own shard, summed; padding is not sent."""
    table = tuple(server_table(servers.engine, json.loads((folder / "config.json").read_text())))
    sharding = ServerSharding(table, dtype=dtype, tp=servers.tp, num_replicas=servers.replicas)
    elements = sum(box_size(box) for rank in range(sharding.num_ranks) for box in _boxes(sharding, rank))
    return elements * int(getattr(torch, dtype).itemsize)


def _boxes(sharding: ServerSharding, rank: int) -> Iterator[Any]:
    for owned in sharding.owned(rank).values():
        for box, _ in owned:
            yield box
