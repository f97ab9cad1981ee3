"""The tensors of an HF folder under the names of its model's table, and whether they are those of the model.

Nothing here needs Megatron.  transformers saves one model in several ways: experts one by one or stacked, tied rows
under either name, a bare decoder without its prefix.  Trainer, conversion and the hf engine read all of them.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from megarl.arch.hf_config import read_hf_config
from megarl.arch.mtp import with_mtp
from megarl.arch.settings.families import settings_of
from megarl.weights.hf.folder import INDEX, SINGLE, HFFolder, files_of_index, open_hf
from megarl.weights.hf.unstacked import Unstacked
from megarl.weights.mapping.blocks import HFConfig, Role
from megarl.weights.mapping.families import (
    FAMILIES,
    ignorable,
    name_beside_vision,
    plain_stacks,
    stacks_for,
    table_for,
    tied,
    untrained,
)
from megarl.weights.mapping.names import Op, ShardCoordinate, some_names


@contextmanager
def open_for(folder: str | Path, hf_config: HFConfig) -> Iterator[HFFolder]:
    """A folder of a model, whose tensors have the names of the model's table."""
    with open_hf(folder) as held:
        if hf_config.get("model_type") not in FAMILIES:
            yield held
            return
        table = table_for(hf_config)
        plain = plain_stacks(table)
        names = [*(name for op in table for name in op.hf_shapes), *(stack.hf_name for stack in plain)]
        _refuse_twins(held, names, hf_config)
        held.rename(dict(_renamed(names, held.shapes, hf_config)))
        stacks = stacks_for(hf_config) or [stack for stack in plain if stack.hf_name in held.shapes]
        yield Unstacked(held, stacks) if stacks else held


def _renamed(names: Sequence[str], held: Container[str], hf_config: HFConfig) -> Iterator[tuple[str, str]]:
    """Names that a folder does not hold -> those under which transformers finds the tensors."""
    of_copies = {original: copy for copy, original in tied(hf_config).items()}
    for name in names:
        others = (*_other_names(name, hf_config), of_copies.get(name))
        if name not in held and (found := next((other for other in others if other in held), None)):
            yield name, found


def _other_names(name: str, hf_config: HFConfig) -> list[str]:
    """Under which transformers finds a tensor, too: of a bare decoder, beside a vision part, and of experts in its own
    modules."""
    beside_vision, bare = name_beside_vision(hf_config, name), name.removeprefix("model.").removeprefix("backbone.")
    in_modules = (name.replace(".block_sparse_moe.", ".mlp."), re.sub("^backbone", "model", name))
    others = (beside_vision, *in_modules, bare)
    return [other for other in others if other != name]


def _refuse_twins(folder: HFFolder, names: Sequence[str], hf_config: HFConfig) -> None:
    """Raise ValueError for a tensor under two names, of which readers take different ones."""
    for name in names:
        for other in _other_names(name, hf_config) if name in folder.shapes else ():
            if other in folder.shapes:
                raise ValueError(f"{folder.folder} holds both {name} and {other}; expected one name of a tensor")


def check_folder(folder: str | Path, role: Role = "actor", *, mtp: str = "off") -> int:
    """The number of tensors in a folder that the trainer can load; only headers of files are read.

    `mtp`: as of `with_mtp`.  Raises ValueError of one sentence for mathematics, names or shapes that ranks refuse.
    """
    hf_config = with_mtp(read_hf_config(folder), mtp)
    with open_for(folder, hf_config) as held:
        check_names(held, table_for(hf_config, role=role), ignorable(hf_config, role))
        settings_of(hf_config)
        return len(held.hub_shapes)


def check_complete(folder: str | Path) -> int:
    """The number of tensors in a folder from which the hf engine can answer; only headers of files are read.

    Raises ValueError for missing tensors; for a family that cannot be trained they are not known.
    """
    hf_config = read_hf_config(folder)
    with open_for(folder, hf_config) as held:
        if hf_config.get("model_type") in FAMILIES and (missing := _missing(held, table_for(hf_config))):
            raise ValueError(misfit(folder, {"missing": missing}))
        return len(held.hub_shapes)


def _missing(folder: HFFolder, table: Sequence[Op]) -> list[str]:
    return [name for op in table if op.required for name in op.hf_shapes if name not in folder.shapes]


def misfit(folder: str | Path, parts: Mapping[str, Sequence[str]]) -> str:
    """The sentence on tensors by what is wrong with them; "" if there are none."""
    faults = [f"{what}: {some_names(names)}" for what, names in parts.items() if names]
    return f"the weights in {folder} do not fit its config.json; {'; '.join(faults)}" if faults else ""


def check_for_sglang(folder: str | Path) -> None:
    """Raise ValueError of one sentence for a folder from which SGLang would load other weights than the trainer.

    It takes all tensors of all files in the index, or of all *.safetensors if there is none, under their own names.
    """
    folder, hf_config = Path(folder), read_hf_config(folder)
    wanted = f"expected a folder that `megarl convert from={folder} to=FOLDER format=hf` wrote"
    with open_hf(folder) as held:
        stored = set(held.shapes)
    with open_for(folder, hf_config) as held:
        renamed = [name for name in held.hub_shapes if name not in stored] if not stacks_for(hf_config) else []
        several = dict(held.in_several)
    others = sorted(path.name for path in folder.glob("*.safetensors") if path.name != SINGLE)
    index = folder / INDEX
    listed = set(files_of_index(index).values()) if index.is_file() else {folder / SINGLE}
    if (folder / SINGLE).is_file() and listed != {folder / SINGLE}:
        raise ValueError(f"{folder}: {INDEX} lists files that are not there beside {SINGLE}; {wanted} for SGLang")
    if not (folder / INDEX).is_file() and others not in ([], ["consolidated.safetensors"]):
        raise ValueError(f"{folder}: SGLang reads {others[0]} beside {SINGLE}, the trainer does not; {wanted}")
    for name, paths in several.items():
        both = " and ".join(path.name for path in paths[:2])
        raise ValueError(f"{folder}: {both} both hold {name}, and SGLang may take either; {wanted}")
    if renamed:
        raise ValueError(f"{folder}: SGLang does not find {some_names(renamed)}, which is stored otherwise; {wanted}")


def check_names(folder: HFFolder, table: Sequence[Op], may_ignore: Container[str]) -> None:
    """Refuse a folder whose tensors are not those of the table."""
    if quantized := next((n for n in folder.shapes if n.endswith("_scale_inv")), None):
        raise ValueError(
            f"{folder.folder}: {quantized} says that its weights are in fp8; expected them in bf16 or float32"
        )
    expected = {name: shape for op in table for name, shape in op.hf_shapes.items()}
    extra = [n for n in folder.shapes if n not in expected and n not in may_ignore]
    misshapen = [
        f"{n} (has {list(folder.shapes[n])}, expected {list(shape)})"
        for n, shape in expected.items()
        if n in folder.shapes and folder.shapes[n] != shape
    ]
    parts = {"missing": _missing(folder, table), "not of this model": extra, "of another shape": misshapen}
    if sentence := misfit(folder.folder, parts):
        raise ValueError(sentence)


def check_tied(folder: HFFolder, pairs: Mapping[str, str], table: Sequence[Op], coordinate: ShardCoordinate) -> None:
    """ValueError if a folder says that its embeddings are tied, but holds output rows that differ from them."""
    for name, original in pairs.items():
        pieces = [p for op in table for p in op.pieces_at(coordinate) if p.hf_name == original]
        for p in pieces if name in folder.shapes else []:
            if not torch.equal(*(folder.read(n, p.dim, p.hf_start, p.length) for n in (name, original))):
                raise ValueError(
                    f"{folder.folder}: {name} differs from {original} though config.json says "
                    "tie_word_embeddings=true; expected equal tensors, or false"
                )


def names_in(folder: Path) -> set[str]:
    """Of the tensors of a folder, as they are stored; none if it has no weights."""
    if not any(folder.glob("*.safetensors")):
        return set()
    with open_hf(folder) as held:
        return set(held.shapes)


@contextmanager
def untrained_in(source: Path, hf_config: HFConfig, role: Role) -> Iterator[HFFolder]:
    """The tensors of a folder that its model holds and does not train, under their names; a critic has none."""
    prefixes = untrained(hf_config) if role == "actor" else ()
    if not prefixes or not any(source.glob("*.safetensors")):
        yield HFFolder(source, {})
        return
    with open_hf(source) as held:
        held.shapes = {name: shape for name, shape in held.shapes.items() if name.startswith(prefixes)}
        yield held
