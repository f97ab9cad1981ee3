"""`megarl evaluate`: the score of a model, its answers, and which weights they are of, in a folder of their own."""

from __future__ import annotations

import hashlib
import math
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

from megarl.config import Config, to_yaml
from megarl.config.names import RIGHT_OR_WRONG
from megarl.config.validate.rewards import trained_names
from megarl.data.prompts import Prompts
from megarl.io.durable_files import THREADS, WEIGHTS, facts_of, write_text
from megarl.io.terminal import sentences
from megarl.metrics.computing.evaluation import Mean, cut_off
from megarl.metrics.computing.samples import write_samples, write_summary
from megarl.metrics.reading.jsonl import ANSWERS, EVALUATED, append_lines
from megarl.metrics.trackers.console import is_core
from megarl.plugins.load import load_plugins
from megarl.samples.sample import LostRollout
from megarl.servers.router import Router
from megarl.servers.supervisor import ServerDied, Servers, State
from megarl.trainer.build import model_folder
from megarl.trainer.checks.reward_trial import read_and_try
from megarl.trainer.checks.rewards import check_rewards, chosen_rewards
from megarl.trainer.collectors import check_agents, generation_settings, make_collectors
from megarl.trainer.evaluation.evaluate import EVALUATIONS, Evaluation, Evaluator
from megarl.trainer.infrastructure import Infrastructure
from megarl.trainer.servers.abilities import dp_ranks_of

TENTHS = 10  # lines of progress where no terminal shows the status


def look_after(servers: Servers, router: Router | None) -> None:
    """Restart servers that died, with the same weights.  Raises ServerDied if no server, or no router, is left.

    The router learns from here which servers come and go, because it does not notice by itself.
    """
    for event in servers.poll():
        if router is not None:
            (router.add if event.state is State.SERVING else router.remove)(event.url)
        if all(state is State.OUT for state in servers.states):
            raise ServerDied(f"no server is left; {event.reason}")


def main(config: Config) -> int:
    """`megarl evaluate`: score model.path on data.val_files, with the servers and rewards of the configuration.

    It writes numbers, answers and the digests of the weights to a new folder in evaluations/ of the run's folder.
    """
    if not config.data.val_files:
        raise ValueError("data.val_files=[]: there is nothing to evaluate; expected at least one file of prompts")
    console = sentences()
    load_plugins(config.algorithm.plugins)
    check_rewards(config)
    if reason := check_agents(config):
        console.print(f"warning: {reason}")
    (read,) = read_and_try(config, ["data.val_files"], console.print, console.print)
    weights = weights_of(config)  # before servers load them
    prompts, sets = read.all(config.data.val_max_samples), read.sets(config.data.val_max_samples)
    with Infrastructure(config, trains=False) as infrastructure, console.status("starting the servers") as status:
        servers, router = infrastructure.serve(), infrastructure.router
        if router is not None:
            for url in servers.urls:
                router.add(url)
        token, reward_url = infrastructure.server_token, infrastructure.reward_url
        urls = [router.url] if router else servers.urls
        generation = replace(generation_settings(config), dp_ranks=dp_ranks_of(infrastructure.ask_servers()))
        with closing(make_collectors(config, urls, token, generation, reward_url)) as collectors:
            evaluator = Evaluator(collectors, prompts, config, sets)
            evaluator.submit()
            began, printed = time.monotonic(), -1
            while not evaluator.ready():
                look_after(servers, router)
                done, total = evaluator.progress
                status.update(f"evaluating: {done} of {total} prompts")
                if not console.is_terminal and done * TENTHS // total > printed:  # there the status is not seen
                    printed = done * TENTHS // total
                    console.print(f"evaluating: {done} of {total} prompts, {time.monotonic() - began:.0f} s")
            found, seconds = evaluator.take(), time.monotonic() - began
    summary = _summary(config, found, read, seconds) | {"rewards": config.reward.fn}
    if chosen := chosen_rewards(config, prompts):
        summary["rewards_by_data_source"] = chosen
    for name, value in summary["metrics"].items():
        if is_core(name):
            console.print(f"{name} {value:.4f}")
    console.print(
        f"{len(found.samples)} answers in {seconds:.1f} s: {summary['tokens_per_s']:.0f} tokens/s; all metrics are in "
        "summary.json"
    )
    if sentence := cut_off(summary["metrics"]):
        console.print(f"warning: {sentence}")
    if "accuracy" in summary:
        console.print(f"accuracy {summary['accuracy']:.4f}")
    folder = new_folder(config.trainer.run_dir)
    write_text(folder / "config.yaml", to_yaml(config))
    append_lines(folder / EVALUATIONS, [found.line(step=0)])
    answered = [group for group in found.groups if not isinstance(group, LostRollout)]
    write_samples(folder / ANSWERS, 0, answered, num_groups=len(answered))
    write_summary(folder / "summary.json", {**summary, "weights": weights})
    console.print(f"results: {folder.resolve()}")
    return 0


def _summary(config: Config, found: Evaluation, read: Prompts, seconds: float) -> dict[str, Any]:
    """The summary of `megarl evaluate`, without the version of the weights, of which its servers hold only one."""
    tokens = sum(sample.num_learnt for sample in found.samples)
    numbers: dict[str, Mean] = {"score": found.mean}
    is_known = not config.has_agents and set(trained_names(config)) <= RIGHT_OR_WRONG
    if found.accuracy is not None and (found.has_acc or found.mean.value > 0 or is_known):
        numbers["accuracy"] = found.accuracy
    out = {name: mean.value for name, mean in numbers.items()}
    out |= {f"{name}_stderr": mean.stderr for name, mean in numbers.items() if math.isfinite(mean.stderr)}
    metrics = {name: value for name, value in found.metrics().items() if name != "val/version"}
    out |= {"prompts": len(found.groups), "prompts_filtered": read.left_out(config.data.val_max_samples)}
    out |= {"prompts_cut": read.num_cut, "answers_per_prompt": found.n}
    return out | {"seconds": round(seconds, 1), "tokens_per_s": round(tokens / seconds, 1), "metrics": metrics}


def new_folder(run_dir: Path) -> Path:
    """Make and return the next free folder: earlier evaluations, and one that runs at the same time, keep theirs."""
    home = run_dir / EVALUATED
    home.mkdir(parents=True, exist_ok=True)
    for number in count(1):
        try:
            (home / str(number)).mkdir()
        except FileExistsError:
            continue
        return home / str(number)
    raise AssertionError("there is always a next number")


def weights_of(config: Config) -> dict[str, Any]:
    """The weights that an evaluation used: {"model", "folder", "sha256", "files": {name: {"bytes", "sha256"}}}.

    "sha256" is the digest of the lines that `sha256sum` prints for the files.  For servers of rollout.urls, which
    loaded their weights before the run, it is {"model", "servers": urls}.
    """
    if config.rollout.urls:
        return {"model": config.model.path, "servers": list(config.rollout.urls)}
    folder = Path(model_folder(config.model.path)).resolve()
    files = sorted(file for pattern in (WEIGHTS, f"{WEIGHTS}.index.json") for file in folder.glob(pattern))
    with ThreadPoolExecutor(THREADS) as threads:
        facts = dict(zip([file.name for file in files], threads.map(facts_of, files), strict=True))
    lines = "".join(f"{of['sha256']}  {name}\n" for name, of in sorted(facts.items()))
    whole = hashlib.sha256(lines.encode()).hexdigest()
    return {"model": config.model.path, "folder": str(folder), "sha256": whole, "files": facts}
