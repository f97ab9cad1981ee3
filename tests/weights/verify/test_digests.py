"""Digests, by torch's operations and by the Triton kernel without a GPU, and answers to the canary prompt."""

import hashlib
import json
import math
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.weights.mapping.names import GateUp, Rename, ShardCoordinate, Vocab
from megarl.weights.mapping.sglang_ops import StackedExperts, StackedQKV
from megarl.weights.verify.canary import Canary, disagreement
from megarl.weights.verify.digests import ParameterDigest, RankDigests, WeightHash, digest

LOW = 2**32 - 1


def words_by_hand(raw: bytes) -> str:
    """SGLang's hash of a CUDA tensor, one word at a time."""

    def mix(x: int) -> int:
        x ^= x >> 16
        x = x * 0x85EBCA6B & LOW
        x ^= x >> 13
        x = x * 0xC2B2AE35 & LOW
        return x ^ (x >> 16)

    def turn(x: int, by: int) -> int:
        return ((x << by) | (x >> (32 - by))) & LOW

    raw += b"\0" * (-len(raw) % 4)
    words = [int.from_bytes(raw[i : i + 4], "little") for i in range(0, len(raw), 4)]
    if not words:
        return "0" * 16
    first, total = 0x243F6A88, 0
    second = ((first * 0x9E3779B1) ^ 0xDEADBEEF) & LOW
    for start in range(0, len(words), 8192):
        high = low = 0
        for i, word in enumerate(words[start : start + 8192], start):
            high += mix(word ^ (((i * 0x27D4EB2D + first) & LOW) ^ turn(i, 15)))
            low += mix(word ^ (((i * 0x165667B1 + second) & LOW) ^ turn(i, 13)))
        size = len(words) * 4 & LOW
        total += mix((high & LOW) ^ size) << 32 | mix((low & LOW) ^ size)
    x = total & (2**64 - 1)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> shift)) * factor & (2**64 - 1)
    return f"{x ^ (x >> 31):016x}"


def test_the_digest_is_the_first_16_digits_of_a_sha256_of_the_elements_in_row_major_order() -> None:
    x = torch.tensor([[1.0, 3.0], [2.0, 4.0]])
    expected = hashlib.sha256(b"".join(struct.pack("<f", number) for number in (1, 2, 3, 4))).hexdigest()[:16]
    assert digest(x.t()) == expected != digest(x)
    zeros = torch.zeros(4, dtype=torch.bfloat16)
    other = zeros.clone()
    other[2] = -0.0
    assert len({digest(each) for each in (zeros, other, zeros.float())}) == 3, "dtypes and single bits"


@pytest.mark.parametrize("size", [0, 1, 4, 7, 4 * 8192, 4 * 8192 + 4, 4 * 20000 + 2])
def test_the_hash_of_words_is_that_of_one_word_at_a_time(size: int) -> None:
    raw = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))
    assert digest(raw, "words") == words_by_hand(bytes(raw.tolist()))


@given(st.lists(st.integers(0, 90_000), max_size=6), st.integers(0, 2**31))
def test_the_hash_of_words_does_not_depend_on_how_the_bytes_are_cut(cuts: list[int], seed: int) -> None:
    raw = torch.randint(0, 256, (90_001,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    pieces = WeightHash()
    for start, stop in zip([0, *sorted(cuts)], [*sorted(cuts), len(raw)], strict=True):
        pieces.update(raw[start:stop])
    assert pieces.hexdigest() == digest(raw, "words")


QKV_BF16 = StackedQKV("qkv", "q", "k", "v", 4, 2, 3, 5)
EXPERTS = ("e.{}.gate", "e.{}.up")
PARAMETERS = {
    "rows of three": (QKV_BF16, ShardCoordinate(1, 2)),
    "replicated heads": (StackedQKV("qkv", "q", "k", "v", 4, 1, 3, 5), ShardCoordinate(3, 4)),
    "a bias": (StackedQKV("bias", "q", "k", "v", 4, 2, 3, None), ShardCoordinate(0, 2)),
    "columns": (Rename("o", "o", (5, 6), 1), ShardCoordinate(1, 2)),
    "gate and up": (GateUp("gu", "g", "u", 6, 5), ShardCoordinate(1, 3)),
    "padded rows": (Vocab("emb", "e", 13, 5, multiple=8), ShardCoordinate(1, 2)),
    "nothing but padding": (Vocab("emb", "e", 3, 5, multiple=8), ShardCoordinate(1, 2)),
    "stacked experts": (
        StackedExperts("w13", EXPERTS, 4, (6, 5), 0),
        ShardCoordinate(ep_rank=1, ep=2, etp_rank=1, etp=2),
    ),
    "experts by columns": (StackedExperts("w2", ("e.{}.down",), 2, (5, 6), 1), ShardCoordinate(etp_rank=1, etp=2)),
}


@pytest.mark.parametrize(("kind", "dtype"), [("sha256", torch.float32), ("words", torch.bfloat16)])
@pytest.mark.parametrize("case", PARAMETERS)
@pytest.mark.parametrize("in_order", [True, False])
def test_a_streamed_parameter_has_the_digest_of_the_whole_one(case, dtype, kind, in_order) -> None:
    op, coordinate = PARAMETERS[case]
    tensors = {name: torch.randn(shape).to(dtype) for name, shape in op.hf_shapes.items()}
    whole = torch.zeros(op.shape_at(coordinate), dtype=dtype)
    for piece in op.pieces_at(coordinate):
        piece.of_shard(whole).copy_(piece.of_hf(tensors[piece.hf_name]))
    streamed = ParameterDigest(op, coordinate, dtype, kind)
    names = list(streamed.hf_names)
    for name in names if in_order else reversed(names):
        streamed.add(name, tensors[name])
    assert streamed.hexdigest() == digest(whole, kind)


def test_a_rank_has_no_digest_of_another_ranks_expert() -> None:
    mine = Rename("x", "x", (2,), expert=(1, 2))
    assert RankDigests([mine], ShardCoordinate(ep_rank=0, ep=2), {"x": torch.float32}, "sha256").result() == {}


IDS = (1, 2, 3, 4)
TRAINER = (-1.0, -2.0, -3.0)


def test_answers_like_the_trainers_are_believed() -> None:
    """A single token may be far off, as an improbable one is in bfloat16; a tensor in the wrong place moves all."""
    canary = Canary(IDS, TRAINER, tolerance=0.1)
    assert disagreement(canary, {"a": [-1.05, -2.0, -3.0], "b": [-1.0, -1.95, -3.05], "c": [-1.0, -2.0, -9.0]}) == {}


@pytest.mark.parametrize("answer", [[-1.0, -2.2, -3.2], [-1.0], [], [-1.0, math.nan, -3.0], [-1.0, -math.inf, -3.0]])
def test_an_answer_unlike_the_trainers_is_named(answer: list[float]) -> None:
    found = disagreement(Canary(IDS, TRAINER, tolerance=0.1), {"a": list(TRAINER), "b": answer})
    assert list(found) == ["b"] and found["b"].startswith("b answers the canary prompt with ")


def test_without_a_trainer_one_of_three_stands_out_and_of_two_neither_is_believed() -> None:
    canary = Canary(IDS, tolerance=0.1)
    same, other = [-1.0, -2.0, -3.0], [-1.0, -2.2, -3.2]
    assert disagreement(canary, {"a": same, "b": same}) == {}
    assert set(disagreement(canary, {"a": same, "b": same, "c": other})) == {"c"}
    assert set(disagreement(canary, {"a": same, "b": other})) == {"a", "b"}
    assert disagreement(canary, {}) == {}


@pytest.mark.parametrize("at", range(3))
def test_numbers_that_are_not_finite_condemn_only_their_server_and_the_trainers_condemn_all(at: int) -> None:
    answers = [[-1.0, -2.0, -3.0]] * 3
    answers[at] = [-1.0, math.nan, -3.0]
    found = disagreement(Canary(IDS, tolerance=0.1), dict(zip("abc", answers, strict=True)))
    assert found == {"abc"[at]: f"{'abc'[at]} answers the canary prompt with log-probs that are not finite"}
    trainer = [-1.0, -2.0, -3.0]
    trainer[at] = math.nan
    assert set(disagreement(Canary(IDS, tuple(trainer), tolerance=0.1), {"a": [-1.0, -2.0, -3.0]})) == {"a"}


ROOT = Path(__file__).parents[3]


def run(interpret: str, cache: Path) -> Any:
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "TRITON_INTERPRET": interpret, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, str(ROOT / "tests/helpers/words_cases.py")]
    env["TRITON_CACHE_DIR"] = str(cache)
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=240)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_the_kernel_hashes_as_torchs_operations_do(tmp_path: Path) -> None:
    cases = run("1", tmp_path)
    assert len(cases) == 8
    for sizes, (by_kernel, by_torch) in cases.items():
        assert by_kernel == by_torch, sizes


@pytest.mark.full
def test_the_kernel_compiles_for_a_gpu(tmp_path: Path) -> None:
    assert run("0", tmp_path) > 1000
