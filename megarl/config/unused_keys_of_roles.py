"""Keys of a role, its optimizer or a teacher that would have no effect under the chosen settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from megarl.config import names
from megarl.config.resolve import data_parallel_size, layout_of
from megarl.config.schema import Config, Optim
from megarl.config.validate.models import group_of, has_folder
from megarl.config.validate.values import value_of


class UnusedKeys(NamedTuple):
    """Keys that match `keys` (patterns, separated by spaces) have no effect if `when` is true."""

    keys: str
    because: str  # {c...} is a value of the configuration
    when: Callable[[Config], bool]


def optim_rows(role: str, optim: Callable[[Config], Optim]) -> tuple[UnusedKeys, ...]:
    name = f"{role}.optim.name={{c.{role}.optim.name}}"
    return (
        UnusedKeys(f"{role}.optim.momentum", f"{name} has no momentum", lambda c: optim(c).name == "adamw"),
        UnusedKeys(f"{role}.optim.betas {role}.optim.eps", f"{name} has no moments", lambda c: optim(c).name == "sgd"),
        UnusedKeys(
            f"{role}.optim.lr_decay_steps {role}.optim.min_lr",
            f"{role}.optim.lr_decay_style=constant never decays",
            lambda c: optim(c).lr_decay_style == "constant",
        ),
    )


def _has_one_copy(config: Config, role: str) -> bool:
    """Is there no other copy, so that there is no gradient or parameter communication to overlap with computation?

    Experts may have copies even if the rest has none: with tp=4, ep=2 and etp=1 each expert is on two of four ranks.
    """
    node, replicas = value_of(config, role), data_parallel_size(config, role)
    layout = layout_of(node.megatron)
    copies_of_experts = node.num_ranks // (layout.ep * layout.expert_tp * layout.pp)
    return replicas * layout.cp == 1 and copies_of_experts == 1


def role_rows(role: str) -> tuple[UnusedKeys, ...]:
    group = f"{role}.megatron"
    return (
        UnusedKeys(
            f"{group}.overlap_grad_reduce {group}.overlap_param_gather",
            f"there is one copy of the {role}, so nothing is reduced or gathered",
            lambda c: _has_one_copy(c, role),
        ),
        UnusedKeys(
            f"{group}.use_distributed_optimizer {group}.overlap_*",
            f"{role}.strategy=fsdp shards everything, and overlaps always",
            lambda c: value_of(c, role).strategy == "fsdp",
        ),
        UnusedKeys(
            f"{group}.override_ddp_config",
            f"{role}.strategy={{c.{role}.strategy}} has another wrapper",
            lambda c: value_of(c, role).strategy != "megatron",
        ),
        UnusedKeys(
            f"{group_of(role)}.config",
            f"the config.json in {group_of(role)}.path={{c.{group_of(role)}.path}} counts",
            # {} takes away the numbers of a recipe's preset, which are those of another model.
            lambda c: has_folder(c, role) and bool(value_of(c, f"{group_of(role)}.config")),
        ),
    )


def teacher_rows(role: str) -> tuple[UnusedKeys, ...]:
    server, model = f"{role}.server", group_of(role)
    return (
        UnusedKeys(f"{model}.config", f"the config.json in {model}.path counts", lambda c: has_folder(c, role)),
        UnusedKeys(
            f"{server}.*", f"{role}.engine=megatron asks no server", lambda c: c.role(role).engine == names.MEGATRON
        ),
        UnusedKeys(
            f"{role}.megatron.* {role}.strategy {role}.num_ranks {role}.first_rank {role}.log_prob_*",
            f"{role}.engine=server runs on no ranks",
            lambda c: c.role(role).engine != names.MEGATRON,
        ),
        UnusedKeys(
            f"{server}.first_gpu {server}.num_gpus {server}.memory_fraction",
            f"{server}.urls names servers that run already",
            lambda c: bool(c.role(role).server.urls),
        ),
        UnusedKeys(
            f"{server}.api_key_env",
            f"{server}.urls=[]: the run starts a server, and knows its key",
            lambda c: not c.role(role).server.urls,
        ),
    )
