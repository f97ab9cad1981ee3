"""What a rank sees of MTP layers: against transformers' own, and over a whole model's way in and out."""

from pathlib import Path
from typing import Any

import torch
from chunks import parameters
from megatron.core.parallel_state import get_pipeline_model_parallel_rank
from megatron.core.transformer.moe.router import TopKRouter
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import MtpModel

from megarl.arch.hf_config import read_hf_config
from megarl.arch.layout import Layout
from megarl.arch.mtp import trained_mtp, with_mtp
from megarl.mcore.checkpoint import checkpoint
from megarl.mcore.models.model import build_model
from megarl.mcore.setup import destroy_groups, make_groups
from megarl.mcore.training.packed_rows import make_row, micro_batches
from megarl.mcore.training.router_replay import add_router_replay
from megarl.samples.batch import Batch
from megarl.weights.count import of_stage
from megarl.weights.hf.export import save_hf
from megarl.weights.hf.load import load_hf

LENGTHS = [3, 20, 1, 7, 2]


def tokens() -> torch.Tensor:
    return torch.randint(0, 45, (sum(LENGTHS),), generator=torch.Generator().manual_seed(3))


def hidden_states(folder: str) -> list[torch.Tensor]:
    """[1 + layers, T, H] of the model and its MTP layers, with all sequences in one row, and with each in its own."""
    make_groups(Layout())
    try:
        hf = with_mtp(read_hf_config(folder), "joint")
        (model,) = build_model(hf, Layout())
        load_hf([model], folder, hf)
        batch, found = Batch(tokens(), torch.tensor(LENGTHS)), []
        for sizes in ([len(LENGTHS)], [1] * len(LENGTHS)):
            rows = [
                make_row(m, Layout(), torch.device("cpu"), (), trained_mtp(hf)) for m in micro_batches(batch, sizes)
            ]
            outs = [model(row.tokens, row.positions, None, packed_seq_params=row.packed) for row in rows]
            found.append(torch.cat(outs, 1).detach())
        return found
    finally:
        destroy_groups()


@torch.no_grad()
def of_transformers(folder: str) -> torch.Tensor:
    """The same by transformers' classes, which read the folder by their own names; each sequence by itself.

    0 where an MTP layer lacks a token that follows.
    """
    hf = with_mtp(read_hf_config(folder), "joint")
    number = trained_mtp(hf)
    main = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager").eval()
    main.config.num_mtp_layers = number
    if hasattr(main.config, "layer_types"):
        main.config.mtp_layer_types = ["full_attention"] * number
    # Those of the published sizes, which transformers names one by one.
    main._keys_to_ignore_on_load_unexpected = [r"^mtp.*"]
    main._keys_to_ignore_on_load_unexpected += [rf"layers\.{hf['num_hidden_layers'] + i}\." for i in range(number)]
    heads, base, whole = MtpModel.from_pretrained(main).eval(), main.get_decoder(), []
    for ids in tokens().split(LENGTHS):
        length = len(ids)
        states = [base(input_ids=ids[None], use_cache=False).last_hidden_state]
        for depth in range(number):
            left = max(0, length - 1 - depth)  # places of which the token of this depth is known
            further = torch.zeros_like(states[0])
            if left:
                positions = torch.arange(1 + depth, 1 + depth + left)[None]
                further[:, :left] = heads.forward_layer(
                    depth, states[-1][:, :left], positions, None, input_ids=ids[None, 1 + depth :]
                )
            states.append(further)
        whole.append(torch.cat(states))
    return torch.cat(whole, 1)


def given_routers(folder: str) -> list[tuple[str, int]]:
    """(name, place among the layers with experts) of the routers whose experts may be given."""
    make_groups(Layout())
    try:
        hf = with_mtp(read_hf_config(folder), "joint")
        (model,) = build_model(hf, Layout())
        add_router_replay([model])
        routers: list[tuple[str, Any]] = [(n, m) for n, m in model.named_modules() if isinstance(m, TopKRouter)]
        return [(name, router.router_replay.layer) for name, router in routers if router.router_replay is not None]
    finally:
        destroy_groups()


def resumed(folder: str, save: str, saved: str, loaded: str) -> str:
    """What is said of a save with MTP layers as `saved` by a model that has them as `loaded`; "" if it is loaded."""
    make_groups(Layout())
    try:
        model, other = (build_model(with_mtp(read_hf_config(folder), how), Layout()) for how in (saved, loaded))
        checkpoint.save(Path(save), model, None)
        checkpoint.load(Path(save), other, None)
    except ValueError as error:
        return str(error)
    finally:
        destroy_groups()
    return ""


def round_trip(source: str, folder: str, layout: Layout) -> tuple[int, int]:
    """From a folder into ranks and into another one -> the rank's number of parameters, and the planned one."""
    make_groups(layout)
    try:
        hf = with_mtp(read_hf_config(source), "joint")
        model = build_model(hf, layout)
        load_hf(model, source, hf)
        save_hf(model, hf, Path(folder), source_folder=source)
        planned = of_stage(hf, layout, get_pipeline_model_parallel_rank(), mtp=trained_mtp(hf)).total
        return sum(param.numel() for param in parameters(model)), planned
    finally:
        destroy_groups()
