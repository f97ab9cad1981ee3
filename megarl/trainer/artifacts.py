"""The results of a run: the exported model, its answers before and after, a learning curve, and a README.md."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import partial
from typing import Any

from rich import box

from megarl.arch.projections import chosen, projections_of
from megarl.config.names import RIGHT_OR_WRONG
from megarl.config.validate.lora import partly_loaded_by_peft
from megarl.config.validate.models import config_of_folder
from megarl.config.validate.rewards import trained_names
from megarl.io.durable_files import kept, kept_text
from megarl.io.terminal import pages
from megarl.metrics.computing.audit import outcome
from megarl.metrics.computing.evaluation import Mean
from megarl.metrics.computing.samples import Answer, prompt_text, samples_table, write_summary
from megarl.metrics.trackers.console import warn
from megarl.trainer.build import model_folder
from megarl.trainer.checks.rewards import chosen_rewards
from megarl.trainer.collectors import make_rewards, reward_settings
from megarl.trainer.evaluation.evaluate import Evaluation
from megarl.trainer.evaluation.in_training import BEFORE
from megarl.trainer.evaluation.transformers_score import Task, TransformersScore
from megarl.trainer.run import Run

NUM_ANSWERS = 12
FILES = {  # what a run's folder may have
    "summary.json": "the result in numbers",
    "report.html": "the run as a page for a browser: curves, times, answers, settings",
    "answers.md": "held-out prompts with the answers before and after",
    "hf": "the trained model, a folder that `transformers` and servers load",
    "adapter": "what was trained of it, a folder that `peft` loads on the model it began with",
    "config.yaml": "every setting; `megarl train --config THIS trainer.experiment_name=again` repeats the run",
    "code.json": "the files of rewards, plug-ins and agents, as they were when the run began",
    "metrics.jsonl": "every number of every step, one JSON object a line",
    "evaluations.jsonl": "of every evaluation: the version of its weights, all rewards",
    "advice.jsonl": "what the curves called for while the run went on",
    "samples.jsonl": "some completions of every step, with their rewards and the weights that generated them",
    "tokens.jsonl": "a few of them token by token, with log-probs, advantages and versions",
    "timeline.jsonl": "of every step: its stages in time, and the seconds of every rank",
    "visits.jsonl": "of every step: which visits of prompts were trained, filtered by dynamic sampling, lost, skipped",
    "checkpoints": "what `trainer.resume_mode=auto` goes on from",
    "logs": "the output of ranks, servers and the collector",
}
WRITTEN_LATER = ("summary.json", "report.html")  # than the page


def finish(run: Run, after: Evaluation) -> dict[str, Any]:
    """Write everything and show the answers; returns the summary."""
    plan = run.plan
    config = run.plan.config
    folder = run.plan.folder
    console = pages()
    run.log.trackers.stage("writing the model")
    run.server_manager.release_memory()  # there is no more generation, and the export needs GPU memory
    hf, adapter = folder / "hf", folder / "adapter" if config.actor.lora.rank else None
    kept(hf, lambda: run.roles.actor.export(hf, adapter=adapter))
    if _is_partly_loaded(run):
        console.print(
            "warning: peft loads adapter/ without its adapters of dense feed-forwards and shared experts; hf/ has all",
            style="yellow",
        )
    is_checked = plan.val_prompts and config.trainer.check_export and after.groups
    again = _score_of_export(run) if is_checked else None
    summary: dict[str, Any] = {"steps": plan.num_steps, **plan.shortened, "rewards": config.reward.fn}
    if rewards := chosen_rewards(config, plan.prompts.questions):
        summary["rewards_by_data_source"] = rewards
    before_file = folder / BEFORE
    before = json.loads(before_file.read_text()) if before_file.exists() else None
    markdown = ""
    if audit := config.reward.audit:
        failed, called = after.audits
        said = outcome(audit, run.log.audit.last, failed, called)
        summary["audit"] = {"outcome": said, "answers": called, "failed": failed}
        markdown = f"{said}\n\n"
        console.print(said)
    if plan.val_prompts:
        has_score = bool(after.groups)  # else no reward could score its answers
        is_share = _is_share(run, before, after)
        name = "accuracy" if is_share else "score"  # a share of right answers, or a mean of rewards
        if not is_share or not has_score:
            summary |= _compared(name, before, after.mean if has_score else None)
        is_known = before is None or before["accuracy"] is not None
        if has_score and after.accuracy is not None and is_known and (is_share or after.has_acc):
            summary |= _compared("accuracy", before, after.accuracy)
        summary["evaluated_version"] = after.version
        if again is not None:
            summary[f"{name}_transformers"] = score = _checked(again, run)
            if score is not None and abs(score - after.mean.value) > 1.5 / len(plan.val_prompts):
                console.print("warning: hf/ scores otherwise in transformers than the server did", style="yellow")
        if has_score:
            table, answers = samples_table(_answers(run, before, after))
            kept_text(folder / "answers.md", answers)
            markdown += answers
            if not console.is_terminal:  # logs of several machines are shown line by line, by who knows what
                table.box = box.ASCII
            console.print(table)
    page = f"# {config.trainer.experiment_name}\n\n| file | what it is |\n| --- | --- |\n"
    for name, what in FILES.items():
        if name in WRITTEN_LATER or (folder / name).exists():
            page += f"| `{name}{'/' * (folder / name).is_dir()}` | {what} |\n"
    kept_text(folder / "README.md", f"{page}\n{markdown}")
    summary |= run.log.totals.state_dict() | {"servers_died": run.server_manager.counts["servers_died"]}
    kept(folder, lambda: write_summary(folder / "summary.json", summary))
    console.print_json(data=summary)
    return summary


def _is_share(run: Run, before: dict[str, Any] | None, after: Evaluation) -> bool:
    """Whether the mean reward is a share of right answers.

    All rewards are 0 or 1, and not all 0: those may be of any scale, unless the reward is known to be right or wrong.
    """
    has_right = after.mean.value > 0 or (before is not None and before["score"] > 0)
    is_known = not run.plan.config.has_agents and set(trained_names(run.plan.config)) <= RIGHT_OR_WRONG
    return after.is_share and (before is None or before["is_share"]) and (has_right or is_known)


def _compared(name: str, before: dict[str, Any] | None, after: Mean | None) -> dict[str, Any]:
    """`after`: None if no reward could score the answers."""
    found = {f"{name}_before": before[name] if before else None, f"{name}_after": after.value if after else None}
    return found | ({f"{name}_after_stderr": after.stderr} if after and math.isfinite(after.stderr) else {})


def _is_partly_loaded(run: Run) -> bool:
    """Whether the run writes an adapter of which PEFT leaves out a part."""
    lora = run.plan.config.actor.lora
    if not lora.rank:
        return False
    hf = config_of_folder(model_folder(run.plan.config.model.path))
    return partly_loaded_by_peft(hf, set(chosen(lora.targets, projections_of(hf))))


def _score_of_export(run: Run) -> TransformersScore:
    # The run is over: an answer without a score must not take what is there.
    on_error = "zero" if run.plan.config.reward.on_error == "zero" else "unscored"
    site = run.infrastructure  # no collector asks for these rewards
    make = make_rewards(run.plan.config, 1, reward_url=site.reward_url, token=site.server_token)
    rewards = partial(make, settings=replace(reward_settings(run.plan.config, 1), on_error=on_error, audit=None))
    task = Task(
        str(run.plan.folder / "hf"),
        run.plan.val_prompts,
        rewards,
        run.plan.config.rollout.val_kwargs.max_response_length,
    )
    log = run.plan.folder / "logs" / "check_export.log"
    return TransformersScore(task, log, silence_s=run.plan.config.trainer.call_timeout_s)


def _checked(again: TransformersScore, run: Run) -> float | None:
    """The score of hf/ in transformers; None, after a warning, without one: the results of a run do not need it."""
    try:
        return again.wait(partial(run.log.trackers.stage, "checking hf/"))
    except RuntimeError as error:
        warn(f"trainer.check_export=true: hf/ is written, and its check failed: {error}")
        return None


def _answers(run: Run, before: dict[str, Any] | None, after: Evaluation) -> list[Answer]:
    then = {answer["uid"]: answer for answer in before["answers"]} if before else {}
    nothing = {"text": "", "reward": None}
    return [
        Answer(
            prompt=prompt_text(prompt),
            ground_truth=prompt.ground_truth,
            before=then.get(prompt.uid, nothing)["text"],
            after=now["text"],
            reward_before=then.get(prompt.uid, nothing)["reward"],
            reward_after=now["reward"],
        )
        for prompt, now in list(zip(run.plan.val_prompts, after.answers(), strict=True))[:NUM_ANSWERS]
    ]
