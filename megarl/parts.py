"""From the configuration to the parts of a run: each function reads the keys of one part, and makes it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from megarl.config import Config, to_yaml
from megarl.data.chat import load_tokenizer
from megarl.data.prompts import Prompts
from megarl.group import Group
from megarl.mcore.setup import Layout
from megarl.metrics.trackers import Trackers, make_trackers
from megarl.rewards.pool import RewardPool
from megarl.rollout import supervisor
from megarl.rollout.launch import EngineLaunch
from megarl.rollout.stream import Stream


def model_folder(path: str) -> str:
    """A folder as it is; a hub name becomes the folder of its snapshot, downloaded where there is a network."""
    if Path(path).is_dir():
        return path
    from huggingface_hub import snapshot_download  # pulls in a network stack that a local run does not need

    try:
        return snapshot_download(path, allow_patterns=["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"])
    except Exception as error:  # no network, no such name, no right to it: the hub has an exception for each
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"model.path={path}: neither a folder nor a name that the hub gives ({reason})") from error


def layout_of(megatron: Any) -> Layout:
    """The keys of an `actor.megatron` group as the room `mcore` names them."""
    return Layout(
        tp=megatron.tensor_model_parallel_size,
        pp=megatron.pipeline_model_parallel_size,
        cp=megatron.context_parallel_size,
        ep=megatron.expert_model_parallel_size or 1,
        etp=megatron.expert_tensor_parallel_size,
        sequence_parallel=megatron.sequence_parallel,
        use_distributed_optimizer=megatron.use_distributed_optimizer,
    )


def make_group(config: Config, layout: Layout, name: str) -> Group:
    trainer = config.trainer
    return Group(
        name,
        trainer.num_ranks,
        layout,
        log_dir=trainer.run_dir / "logs" / name,
        device=trainer.device,
        seed=trainer.seed,
        call_timeout_s=trainer.call_timeout_s,
    )


def start_trackers(config: Config, num_steps: int, resume_step: int | None) -> Trackers:
    trainer = config.trainer
    plain = {"config": to_yaml(config)}
    return make_trackers(
        trainer.logger, trainer.run_dir, trainer.project_name, trainer.experiment_name, plain, num_steps,
        resume_step=resume_step,
    )  # fmt: skip


def optimizer_steps(config: Config, role: Any, num_iterations: int) -> int:
    """Optimizer steps of a role in so many iterations."""
    return max(1, num_iterations * role.ppo_epochs * -(-config.data.train_batch_size // role.ppo_mini_batch_size))


def optim_settings(role: Any, total_steps: int) -> dict[str, Any]:
    """The `optim` group of a role as mcore.optimizer.OptimSettings names it."""
    optim = role.optim
    return {
        "name": optim.name,
        "lr": optim.lr,
        "betas": list(optim.betas),
        "eps": optim.eps,
        "weight_decay": optim.weight_decay,
        "momentum": optim.momentum,
        "max_grad_norm": role.max_grad_norm,
        "warmup_steps": optim.lr_warmup_steps,
        "decay_style": optim.lr_decay_style,
        "decay_steps": optim.lr_decay_steps or total_steps,
        "min_lr": optim.min_lr,
    }


def lora_settings(config: Config) -> dict[str, Any] | None:
    """What the actor's `load` wants to know of its adapters; None trains all weights."""
    lora = config.actor.lora
    if lora.rank == 0:
        return None
    return {"rank": lora.rank, "alpha": lora.alpha, "targets": list(lora.targets), "seed": config.trainer.seed}


def make_servers(config: Config, token: str) -> supervisor.Servers:
    """The rollout servers of a run, not yet started, with the weights of model.path."""
    rollout, lora = config.rollout, config.actor.lora
    launch = EngineLaunch(
        rollout.engine,
        model_folder(config.model.path),
        host=rollout.host,
        dtype=rollout.dtype,
        tensor_parallel_size=rollout.tensor_model_parallel_size,
        max_running_requests=rollout.max_running_requests,
        max_total_tokens=rollout.max_total_tokens,
        random_seed=rollout.seed,
        python=rollout.sglang.python,
        args=(*rollout.sglang.args, *_in_flight_args(config)),
        device=None if config.trainer.device == "auto" else config.trainer.device,
        lora_rank=lora.rank if lora.push == "adapter" else 0,
        lora_targets=tuple(lora.targets),
    )
    patience = supervisor.Supervision(max_restarts=rollout.max_restarts)
    return supervisor.Servers([launch] * rollout.num_servers, token, config.trainer.run_dir / "logs", patience)


def _in_flight_args(config: Config) -> list[str]:
    """Pushed in place, SGLang keeps its cache, and would begin new completions with prefixes that old weights made."""
    return ["--disable-radix-cache"] if config.rollout.engine == "sglang" and config.rollout.ahead else []


def plugins(config: Config) -> list[str]:
    """The user's modules and files, by names that hold in every process."""
    specs = config.algorithm.plugins
    return [str(Path(spec).expanduser().resolve()) if spec.endswith(".py") else spec for spec in specs]


def make_stream(config: Config, urls: Sequence[str], token: str, *, fenced: bool = False) -> Stream:
    """The collector of a run, started; `fenced`: it asks a server only once that is trusted."""
    reward = config.reward
    return Stream(
        urls=urls,
        token=token,
        tokenizer_path=model_folder(config.model.tokenizer_path),
        make_scorer=partial(
            RewardPool, reward.fn, reward.num_workers, reward.timeout_s, reward.on_error, plugins(config)
        ),
        timeout_s=config.rollout.request_timeout_s,
        log_path=config.trainer.run_dir / "logs" / "collector.log",
        fenced=fenced,
    )


def read_prompts(config: Config, files: Sequence[str], *, overlong: str) -> Prompts:
    """The prompts of these files as the run tokenises them."""
    data = config.data
    return Prompts(
        files,
        load_tokenizer(model_folder(config.model.tokenizer_path)),
        prompt_key=data.prompt_key,
        ground_truth_key=data.ground_truth_key,
        max_prompt_length=data.max_prompt_length,
        shuffle=data.shuffle,
        seed=data.seed,
        overlong=overlong,
        system_prompt=data.system_prompt,
    )
