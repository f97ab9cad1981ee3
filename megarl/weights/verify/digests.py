"""Computes the checksums that a server must report, from the stream of tensors on the trainer.

SGLang hashes each parameter of each of its ranks: on a CPU with SHA-256, on CUDA with a sum over 32-bit words.  Both
are reproduced here although the trainer never holds the server's parameter: its tensors come one by one, in any order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.util import find_spec
from typing import Literal

import torch
from torch import Tensor

from megarl.weights.mapping.names import Op, Piece, ShardCoordinate, num_bytes

Kind = Literal["sha256", "words"]  # as SGLang hashes on a CPU | on CUDA

_LOW = 0xFFFFFFFF
_TILE = 8192  # words that are summed before the sum is mixed
_CHUNK = 32 * _TILE  # words that torch's operations hash at a time, which bounds the memory
_SEEDS = (0x243F6A88, ((0x243F6A88 * 0x9E3779B1) ^ 0xDEADBEEF) & _LOW)
_PLACES = ((0x27D4EB2D, 15), (0x165667B1, 13))  # factor and rotation of a word's number, one pair for each seed


class Sha256:
    """The first 64 bits of SHA-256, as 16 hex digits, of bytes that come in order: [bytes] uint8 on any device."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def update(self, raw: Tensor) -> None:
        self._hash.update(raw.cpu().numpy().data)

    def hexdigest(self) -> str:
        return self._hash.hexdigest()[:16]


class WeightHash:
    """SGLang's hash of a CUDA tensor: each 32-bit word is mixed with its number; sums of 8,192 are mixed and summed.

    Runs on the device of its input, and waits for it only in `hexdigest`.
    """

    def __init__(self) -> None:
        self._rest = torch.empty(0, dtype=torch.uint8)  # bytes of an unfinished word
        self._num_words = 0
        self._sums: list[Tensor] = []  # [2, tiles] of each run of words; its last tile may continue in the next run

    def update(self, raw: Tensor) -> None:
        if self._rest.numel():
            raw = torch.cat([self._rest.to(raw.device), raw])
        whole = raw.numel() // 4 * 4
        self._rest = raw[whole:].clone()
        if whole:
            words = raw[:whole].clone() if raw.storage_offset() % 4 else raw[:whole]
            self._add(words.view(torch.int32))

    def _add(self, words: Tensor) -> None:
        sums = (_gpu_tile_sums if words.is_cuda else tile_sums)(words, self._num_words)
        if self._num_words % _TILE:  # the last tile so far continues
            self._sums[-1][:, -1] += sums[:, 0].to(self._sums[-1].device)
            sums = sums[:, 1:]
        if sums.numel():
            self._sums.append(sums)
        self._num_words += len(words)

    def hexdigest(self) -> str:
        if self._rest.numel():
            self.update(self._rest.new_zeros(4 - self._rest.numel()))
        total, length = 0, (self._num_words * 4) & _LOW
        for sums in self._sums:
            high, low = _mix((sums.long() & _LOW) ^ length).sum(1).tolist()
            total += (high << 32) + low
        return f"{_mix64(total & (2**64 - 1)):016x}" if self._num_words else f"{0:016x}"


def tile_sums(words: Tensor, first: int) -> Tensor:
    """[2, T]: for each tile that `words` (int32) touches the two sums of its mixed words, of which 32 bits count.

    `first`: the number of the first word.  Takes a few megabytes at a time.
    """
    start = first // _TILE
    sums = torch.zeros(2, (first + len(words) - 1) // _TILE - start + 1, dtype=torch.int64, device=words.device)
    for chunk in words.split(_CHUNK):
        numbers = torch.arange(first, first + len(chunk), device=words.device)
        value, tiles = chunk.long() & _LOW, numbers // _TILE - start
        for (factor, turn), seed, sum_ in zip(_PLACES, _SEEDS, sums, strict=True):
            place = ((numbers * factor + seed) & _LOW) ^ (
                ((numbers << turn) | ((numbers & _LOW) >> (32 - turn))) & _LOW
            )
            sum_.index_add_(0, tiles, _mix(value ^ place))
        first += len(chunk)
    return sums


_gpu_tile_sums: Callable[[Tensor, int], Tensor] = tile_sums
if torch.cuda.is_available() and find_spec("triton"):  # without CUDA, SGLang's environment has a stub named triton
    from megarl.weights.verify import weight_hash_triton

    _gpu_tile_sums = weight_hash_triton.tile_sums


def _mix(x: Tensor) -> Tensor:
    """MurmurHash3's 32-bit finalizer on values below 2**32, held in int64 (whose products keep the low bits)."""
    x = x ^ (x >> 16)
    x = (x * 0x85EBCA6B) & _LOW
    x = x ^ (x >> 13)
    x = (x * 0xC2B2AE35) & _LOW
    return x ^ (x >> 16)


def _mix64(x: int) -> int:
    """The finalizer of splitmix64."""
    x ^= x >> 30
    x = x * 0xBF58476D1CE4E5B9 & (2**64 - 1)
    x ^= x >> 27
    x = x * 0x94D049BB133111EB & (2**64 - 1)
    return x ^ (x >> 31)


Hash = Sha256 | WeightHash
HASHES: Mapping[Kind, type[Hash]] = {"sha256": Sha256, "words": WeightHash}


def digest(tensor: Tensor, kind: Kind = "sha256") -> str:
    """16 hex digits of a whole tensor's bytes in row-major order."""
    return hashed(tensor, kind).hexdigest()


def hashed(tensor: Tensor, kind: Kind = "sha256") -> Hash:
    """The same before its digits are read: `words` on a GPU are only started, so many can be under way."""
    out = HASHES[kind]()
    out.update(as_bytes(tensor))
    return out


def as_bytes(tensor: Tensor) -> Tensor:
    """[bytes] uint8 in row-major order; shares memory if the tensor is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


class ParameterDigest:
    """The digest of one parameter of one server rank, computed from the HF tensors that it is composed of.

    Rows that belong to no piece are zero.  Bytes that come too early are copied and kept until it is their turn.
    """

    def __init__(self, op: Op, coordinate: ShardCoordinate, dtype: torch.dtype, kind: Kind) -> None:
        shape = op.shape_at(coordinate)
        self._dtype, self._added = dtype, op.added
        self._hash = HASHES[kind]()
        self._num_bytes, self._at = num_bytes(shape, dtype), 0
        self._device = torch.device("cpu")  # of the tensors, as soon as there was one
        self._waiting: dict[int, Tensor] = {}  # first byte -> bytes
        self._pieces: dict[str, list[tuple[Piece, int]]] = {}
        for piece in op.pieces_at(coordinate):
            self._pieces.setdefault(piece.hf_name, []).append((piece, _first_byte(piece, shape, dtype)))
        self._starts = sorted(start for pieces in self._pieces.values() for _, start in pieces)

    @property
    def hf_names(self) -> Iterable[str]:
        return self._pieces.keys()

    def add(self, hf_name: str, tensor: Tensor) -> None:
        """`tensor`: the whole HF tensor, as it is sent; the server converts it to its type."""
        for piece, start in self._pieces[hf_name]:
            assert start in self._starts, f"{hf_name} came twice"
            held = piece.of_hf(tensor).to(self._dtype)
            raw = as_bytes(held + self._added if self._added else held)
            if start == self._starts[0]:
                self._take(start, raw)
            else:
                self._waiting[start] = raw.clone()
            while self._starts and self._starts[0] in self._waiting:
                self._take(self._starts[0], self._waiting.pop(self._starts[0]))

    def _take(self, start: int, raw: Tensor) -> None:
        assert start >= self._at, "two pieces of a parameter overlap"
        self._device = raw.device
        self._zeros(start - self._at)
        self._hash.update(raw)
        self._at += raw.numel()
        self._starts.pop(0)

    def _zeros(self, count: int) -> None:
        while count:
            some = min(count, 4 * _CHUNK)
            self._hash.update(torch.zeros(some, dtype=torch.uint8, device=self._device))
            count, self._at = count - some, self._at + some

    def hexdigest(self) -> str:
        """Call it after every tensor was added."""
        assert not self._starts, "tensors of a parameter are missing"
        self._zeros(self._num_bytes - self._at)
        return self._hash.hexdigest()


def _first_byte(piece: Piece, shape: Sequence[int], dtype: torch.dtype) -> int:
    """The first byte of a piece in its parameter; the piece must be contiguous there."""
    rows_of_one = shape if piece.index is None else shape[1:]
    one = torch.Size(rows_of_one).numel()
    first = 0 if piece.index is None else piece.index * one
    if piece.dim:
        assert piece.length == rows_of_one[piece.dim], f"{piece.hf_name} is no run of bytes of its parameter"
        return first * dtype.itemsize
    return (first + piece.shard_start * (one // rows_of_one[0])) * dtype.itemsize


class RankDigests:
    """The digests of every parameter that one rank of a server holds."""

    def __init__(
        self, table: Sequence[Op], coordinate: ShardCoordinate, dtypes: Mapping[str, torch.dtype], kind: Kind
    ) -> None:
        """`dtypes`: HF name -> the type in which it is sent, which the server keeps but for an `own_dtype`."""
        self._of_param: dict[str, ParameterDigest] = {}
        self._users: dict[str, list[ParameterDigest]] = {}  # HF name -> the parameters it is part of
        for op in table:
            if op.held_by(coordinate):
                sent = dtypes[next(iter(op.hf_shapes))]
                held = getattr(torch, op.own_dtype) if op.own_dtype else sent
                one = ParameterDigest(op, coordinate, held, kind)
                self._of_param[op.param] = one
                for name in one.hf_names:
                    self._users.setdefault(name, []).append(one)

    def add(self, hf_name: str, tensor: Tensor) -> None:
        for user in self._users.get(hf_name, ()):
            user.add(hf_name, tensor)

    def result(self) -> dict[str, str]:
        """Parameter -> 16 hex digits; call it after every tensor was added."""
        return {param: one.hexdigest() for param, one in self._of_param.items()}
