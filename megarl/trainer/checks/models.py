"""What ranks and servers would refuse of a role's model, asked in one process before they start."""

from __future__ import annotations

from pathlib import Path

from megarl.config import Config
from megarl.config.validate.models import group_of, model_of
from megarl.hf_config import read_hf_config
from megarl.weights.hf.folder import HFFolder
from megarl.weights.hf.named import check_complete, check_folder, check_for_sglang, check_tied, open_for
from megarl.weights.mapping.blocks import Role as Kind
from megarl.weights.mapping.families import table_for, tied
from megarl.weights.mapping.names import ShardCoordinate

WHOLE_BYTES = 2 * 2**30  # of weights that are read whole, in a few seconds; of more of them only norms and biases


def check_model(config: Config, role: str, folder: str, *, trains: bool, serves: bool) -> str:
    """A line on a role's model.  Raises ValueError with the sentence of the ranks or servers that would refuse it.

    As many weights are read as WHOLE_BYTES allow, to find numbers that are not finite.  `trains`: ranks do;
    `serves`: rollout servers read the policy's folder.
    """
    kind: Kind = "critic" if role == "critic" else "actor"
    num_tensors = check_folder(folder, kind) if trains else check_complete(folder)
    if serves and role == "actor" and config.rollout.engine != "hf":
        check_for_sglang(folder)
    hf = read_hf_config(folder)
    with open_for(folder, hf) as held:
        if kind == "actor" and trains:
            check_tied(held, tied(hf), table_for(hf), ShardCoordinate())
        names = _to_read(held, Path(folder))
        for name in names:
            held.read(name, 0, 0, held.shapes[name][0])  # raises for numbers that are not finite
        rest = "" if len(names) == len(held.shapes) else f", of which the norms and biases, {len(names):,}, were read"
    return f"{group_of(role)}.path={model_of(config, role).path}: {num_tensors:,} tensors{rest}"


def _to_read(held: HFFolder, folder: Path) -> list[str]:
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    return [name for name, shape in held.shapes.items() if shape and (len(shape) == 1 or size <= WHOLE_BYTES)]
