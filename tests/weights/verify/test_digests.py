import hashlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.rollout.protocol import tensor_digest
from megarl.weights.mapping.names import GateUp, Rename, ShardCoordinate, Vocab
from megarl.weights.mapping.sglang_ops import StackedExperts, StackedQKV
from megarl.weights.verify.digests import ParameterDigest, RankDigests, Words, digest

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


def test_the_digest_is_the_first_16_digits_of_a_sha256() -> None:
    x = torch.tensor([1.0, 2.0])
    expected = hashlib.sha256(b"\x00\x00\x80\x3f\x00\x00\x00\x40").hexdigest()[:16]
    assert digest(x) == tensor_digest(x) == expected


def test_a_digest_is_of_the_elements_in_row_major_order() -> None:
    x = torch.arange(6.0).view(2, 3)
    assert digest(x.t()) == digest(x.t().contiguous()) != digest(x)


@pytest.mark.parametrize("size", [0, 1, 4, 7, 4 * 8192, 4 * 8192 + 4, 4 * 20000 + 2])
def test_the_hash_of_words_is_that_of_one_word_at_a_time(size: int) -> None:
    raw = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))
    assert digest(raw, "words") == words_by_hand(bytes(raw.tolist()))


@given(st.lists(st.integers(0, 90_000), max_size=6), st.integers(0, 2**31))
def test_the_hash_of_words_does_not_depend_on_how_the_bytes_are_cut(cuts: list[int], seed: int) -> None:
    raw = torch.randint(0, 256, (90_001,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    pieces = Words()
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


@pytest.mark.parametrize("kind", ["sha256", "words"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
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


def test_one_wrong_element_or_two_swapped_experts_change_the_digest() -> None:
    op, coordinate = StackedExperts("w13", EXPERTS, 2, (6, 5), 0), ShardCoordinate()
    tensors = {name: torch.randn(shape) for name, shape in op.hf_shapes.items()}

    def whole(of: dict[str, torch.Tensor]) -> str:
        ranks = RankDigests([op], coordinate, dict.fromkeys(of, torch.float32), "sha256")
        for name, tensor in of.items():
            ranks.add(name, tensor)
        return ranks.result()["w13"]

    bent = {name: tensor.clone() for name, tensor in tensors.items()}
    bent["e.1.up"][5, 4] += 1e-6
    swapped = tensors | {"e.0.up": tensors["e.1.up"], "e.1.up": tensors["e.0.up"]}
    assert len({whole(tensors), whole(bent), whole(swapped)}) == 3


def test_a_rank_has_no_digest_of_another_ranks_expert() -> None:
    mine = Rename("x", "x", (2,), expert=(1, 2))
    assert RankDigests([mine], ShardCoordinate(ep_rank=0, ep=2), {"x": torch.float32}, "sha256").result() == {}
