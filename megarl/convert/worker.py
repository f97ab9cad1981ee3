"""A rank of a conversion: holds its shard of the model, and reads, writes or digests it tensor by tensor.

Run on each rank as `python -m megarl.convert.worker`.  A job is a generator.  The driver continues it by a number of
bytes at a time, and every rank stops at the same tensor, so the driver can show the progress.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.group.follow import Answer, follow
from megarl.hf_config import read_hf_config
from megarl.layout import Layout
from megarl.mcore.checkpoint import checkpoint
from megarl.mcore.checkpoint.held import held_weights
from megarl.mcore.checkpoint.intact import faults_of_share
from megarl.mcore.checkpoint.torch_dist import TorchDistReader
from megarl.mcore.models.lora import LoraSettings, apply_lora, merge
from megarl.mcore.models.model import DTYPES, Model, build_model
from megarl.mcore.setup import RankInfo, initialize, replica_group
from megarl.processes.connection import Tensors
from megarl.rollout.protocol import tensor_digest
from megarl.weights.hf.export import finish_folder, hf_sizes, hf_tensors, start_folder
from megarl.weights.hf.folder import HFFolder
from megarl.weights.hf.gather import ModelParallel, local_parameters
from megarl.weights.hf.load import fill, load_hf
from megarl.weights.hf.named import check_names, check_tied, open_for
from megarl.weights.mapping.blocks import Role
from megarl.weights.mapping.families import ignorable, table_for, tied
from megarl.weights.mapping.names import num_bytes
from megarl.weights.push.buckets import Sizes

Part = tuple[int, dict[str, str]]  # bytes, and the digest of each tensor if the job makes digests
Job = Iterator[Part]


class Worker:
    """The methods that the driver calls."""

    def __init__(self) -> None:
        self.rank_info: RankInfo
        self.share: Any
        self.layout: Layout
        self.model: Model
        self.hf: dict[str, Any]
        self.role: Role
        self.dtype: torch.dtype
        self.sizes: Sizes
        self.job: Job
        self.jobs: dict[str, Callable[..., Job]] = {
            job.__name__: job
            for job in (
                self.read_hf,
                self.write_hf,
                self.read_megatron,
                self.read_torch_dist,
                self.write_megatron,
                self.digest,
                self.digest_hf,
            )
        }

    def handlers(self) -> dict[str, Callable[[dict[str, Any], Tensors], Answer]]:
        return {method.__name__: method for method in (self.setup, self.build, self.begin, self.go_on)}

    def setup(self, arguments: dict[str, Any], _: Tensors) -> Answer:
        self.layout = Layout(**arguments.pop("layout"))
        self.rank_info = initialize(self.layout, **arguments)
        self.share = replica_group(timeout_s=arguments["timeout_s"])
        return {"replica": self.rank_info.replica, "is_reporter": self.rank_info.is_reporter}, {}

    def build(self, arguments: dict[str, Any], _: Tensors) -> Answer:
        """Build the model of an HF config.json without loading weights; returns shapes and types of its HF tensors."""
        self.hf, self.role = read_hf_config(arguments["folder"]), arguments["role"]
        self.dtype = DTYPES[arguments["dtype"]]
        self.model = build_model(self.hf, self.layout, role=self.role, dtype=arguments["dtype"])
        self.sizes = hf_sizes(self.model, self.hf, role=self.role)
        return {"tensors": {name: [list(shape), str(dtype)] for name, (shape, dtype) in self.sizes.items()}}, {}

    def begin(self, arguments: dict[str, Any], _: Tensors) -> Answer:
        self.job = self.jobs[arguments.pop("job")](**arguments)
        return {}, {}

    def go_on(self, arguments: dict[str, Any], _: Tensors) -> Answer:
        """Continue the job for at least `num_bytes`, or to its end."""
        done = 0
        digests: dict[str, str] = {}
        for size, found in self.job:
            done, digests = done + size, digests | found
            if done >= arguments["num_bytes"]:
                return {"finished": False, "num_bytes": done, "digests": digests}, {}
        return {"finished": True, "num_bytes": done, "digests": digests}, {}

    def read_hf(self, folder: str) -> Job:
        """Read only this rank's slices; for progress each parameter counts as whole on every rank."""
        table, coordinate = table_for(self.hf, role=self.role), ModelParallel.current().coordinate
        params = local_parameters(self.model)
        left = set(params)
        with open_for(folder, self.hf) as source:
            check_names(source, table, ignorable(self.hf, self.role))
            for op in table:
                own = {name: params[name] for name in (op.param, *op.copies) if name in params}
                left -= own.keys()
                fill(own, [op], source, coordinate)
                yield sum(num_bytes(shape, self.dtype) for shape in op.hf_shapes.values()), {}
            if self.role == "actor":
                check_tied(source, tied(self.hf), table, coordinate)
        assert not left, f"the table has no mapping for {', '.join(sorted(left))}"

    def write_hf(self, folder: str, source_folder: str) -> Job:
        """Rank 0 writes; its errors reach the driver, which then stops the other ranks."""
        writer = start_folder(Path(folder), self.sizes) if self.rank_info.rank == 0 else None
        for name, tensor in hf_tensors(self.model, self.hf, role=self.role):
            if writer:
                writer.add(name, tensor)
            yield num_bytes(*self.sizes[name]), {}
        if writer:
            writer.finish()
            finish_folder(Path(folder), Path(source_folder), self.role, next(d for _, d in self.sizes.values()))

    def read_megatron(self, folder: str, base: str) -> Job:
        """Read all tensors in one step; weights are zeroed first, because a checkpoint may have fewer rows of padding.

        Adapters are loaded onto the weights of `base`, an HF folder, and merged.
        """
        if faults := faults_of_share(Path(folder), dist.get_rank(), dist.get_world_size()):
            raise ValueError(f"{'; '.join(faults)}; expected an unchanged folder")
        adapters = checkpoint.adapters_in(Path(folder))
        if adapters is None:
            for tensor in local_parameters(self.model).values():
                tensor.zero_()
        else:
            load_hf(self.model, base, self.hf, role=self.role)
            apply_lora(self.model, LoraSettings(adapters["rank"], adapters["alpha"], tuple(adapters["targets"])))
        checkpoint.load(Path(folder), self.model, None)
        if adapters is not None:
            merge(self.model)
        yield self._total_bytes, {}

    def read_torch_dist(self, folder: str) -> Job:
        """Read the weights of a folder of Megatron's own format in one step."""
        for tensor in local_parameters(self.model).values():
            tensor.zero_()
        TorchDistReader(Path(folder)).fill(held_weights(self.model, own=False))
        yield self._total_bytes, {}

    def write_megatron(self, folder: str) -> Job:
        """Write all tensors in one step: every rank writes its own files."""
        checkpoint.save(Path(folder), self.model, None)
        yield self._total_bytes, {}

    def digest(self) -> Job:
        """Digests, on rank 0, of the HF tensors that the ranks hold together."""
        for name, tensor in hf_tensors(self.model, self.hf, role=self.role):
            yield num_bytes(*self.sizes[name]), {name: _digest(tensor)} if self.rank_info.rank == 0 else {}

    def digest_hf(self, folder: str) -> Job:
        """The same for a folder, tensor by tensor, cast to the model's types; includes tensors unknown to the model."""
        with open_for(folder, self.hf) as source:
            for name in source.hub_shapes:
                if name not in ignorable(self.hf, self.role):
                    yield self._digest_stored(source, name)

    def _digest_stored(self, source: HFFolder, name: str) -> Part:
        """Only rank 0 reads; bytes are counted in the model's types, so that all ranks stop at the same tensor."""
        shape, dtype = self.sizes.get(name, (source.hub_shapes[name], torch.float32))
        if self.rank_info.rank > 0:
            return num_bytes(shape, dtype), {}
        return num_bytes(shape, dtype), {name: _digest(source.read_hub(name).to(dtype))}

    @property
    def _total_bytes(self) -> int:
        return sum(num_bytes(*size) for size in self.sizes.values())


def _digest(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {tensor_digest(tensor)}"


def main() -> None:
    worker = Worker()
    follow(worker.handlers(), lambda: worker.share, lambda: worker.rank_info.is_first)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
