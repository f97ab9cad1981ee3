"""Supervised fine-tuning on prompts and responses, with the actor of the RL loop: packed rows, prompts masked out.

The loss is REINFORCE with an advantage of 1 on every response token: -log p, averaged over the step's response tokens.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import torch
from rich.console import Console

from megarl.algo.loss import ActorLoss
from megarl.config import Config, to_yaml
from megarl.data.chat import load_tokenizer
from megarl.data.sft import SftExamples
from megarl.metrics.plots import learning_curve
from megarl.metrics.report import write_summary
from megarl.metrics.stats import finalise
from megarl.metrics.timer import Timer
from megarl.roles.handles import Actor, Packing, Update
from megarl.sample import Batch
from megarl.trainer.build import engine_settings, make_group, model_folder, optim_settings, start_trackers
from megarl.trainer.infrastructure import Infrastructure
from megarl.trainer.owner import owned


def sft(config: Config) -> dict[str, Any]:
    """Train for trainer.total_training_steps or sft.epochs, write `hf/` into the run's folder, return the summary."""
    with owned(config.trainer.run_dir):
        return _train(config)


def _train(config: Config) -> dict[str, Any]:
    folder, settings = config.trainer.run_dir, config.sft
    model_path = model_folder(config.model.path)
    tokenizer = load_tokenizer(model_folder(config.model.tokenizer_path))
    examples = SftExamples(
        settings.train_files,
        tokenizer,
        prompt_key=settings.prompt_key,
        response_key=settings.response_key,
        max_length=settings.max_length,
        seed=config.data.seed,
        system_prompt=config.data.system_prompt,
        template=config.data.apply_chat_template_kwargs,
    )
    num_steps = config.trainer.total_training_steps or settings.epochs * len(examples) // settings.batch_size
    if num_steps < 1:
        raise ValueError(
            f"sft.batch_size={settings.batch_size}: there are {len(examples)} examples in {settings.epochs} epochs; "
            "use a smaller batch or more epochs"
        )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(to_yaml(config))
    trackers, began = start_trackers(config, num_steps, None), time.monotonic()
    try:
        trackers.stage("starting ranks")
        with (
            Infrastructure(config, serves=False) as infrastructure,
            make_group(config, config.actor, "ranks_0", nodes=infrastructure.nodes) as group,
        ):
            packing = Packing(config.actor.ppo_max_token_len_per_gpu, config.actor.ppo_micro_batch_size_per_gpu)
            actor = Actor("actor", group, packing, update_settings=_update(config))
            group.start()
            optim, engine = optim_settings(config.actor, num_steps), engine_settings(config.actor)
            actor.load(model_path, dtype=config.model.dtype, optim=optim, engine=engine)
            timer, metrics = Timer(on_stage=trackers.stage), {}
            for step in range(num_steps):
                with timer("update"):
                    batch = supervised(examples.take(settings.batch_size))
                    stats = finalise(actor.update(batch, seed=step))
                metrics = {"sft/loss": stats["actor/pg_loss"], "sft/grad_norm": stats["actor/grad_norm"]}
                metrics |= {"sft/lr": stats["actor/lr"]} | timer.finish(num_tokens=batch.num_tokens)
                trackers.log(step + 1, metrics)
            trackers.stage("writing the model")
            actor.export(folder / "hf")
    finally:
        trackers.close()
    summary = {"steps": num_steps, "loss": metrics["sft/loss"], "wall_s": round(time.monotonic() - began, 1)}
    if (folder / "metrics.jsonl").exists():
        learning_curve(folder / "metrics.jsonl", folder / "learning_curve.png", title=config.trainer.experiment_name)
    write_summary(folder / "summary.json", summary)
    return summary


def supervised(batch: Batch) -> Batch:
    """Add the columns with which REINFORCE is the cross entropy: advantages 1, old log-probs 0."""
    ones, zeros = torch.ones(batch.num_tokens), torch.zeros(batch.num_tokens)
    groups = torch.arange(batch.num_sequences)
    return replace(batch, per_sequence={"group": groups}).with_columns(advantages=ones, old_log_probs=zeros)


def _update(config: Config) -> Update:
    return Update(loss=ActorLoss("reinforce"), prompts_per_step=config.sft.batch_size)


def main(config: Config) -> int:
    """`megarl sft`."""
    sft(config)
    Console().print(f"results: {config.trainer.run_dir.resolve()}", highlight=False)
    return 0
