"""The score of a model on held-out prompts, through the same servers and rewards as the training."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from megarl.config import Config
from megarl.data.chat import load_tokenizer
from megarl.data.hf_config import read_config
from megarl.plugins import load_plugins
from megarl.processes.presence import show_life
from megarl.rewards.result import Outcome
from megarl.rewards.scorer import Rewards
from megarl.rollout.collector.collector_client import Collectors, Ticket
from megarl.rollout.protocol import SamplingParams
from megarl.sample import Completion, LostRollout, Prompt, Sample, VersionSpan
from megarl.servers.router import Router
from megarl.servers.supervisor import ServerDied, Servers, State
from megarl.trainer.build import read_prompts
from megarl.trainer.collectors import check_agents, check_rewards, make_collectors
from megarl.trainer.infrastructure import Infrastructure
from megarl.trainer.reward_trial import RewardTrial


@dataclass(frozen=True)
class Evaluation:
    """The groups in the order of the prompts; a lost group scores 0, one that could not be scored does not count."""

    groups: list[list[Sample] | LostRollout]
    n: int = 1  # completions that were asked for, of each prompt

    @property
    def accuracy(self) -> float:
        """Mean over prompts of the mean reward of their completions; 0 without prompts."""
        scores = [self._score(group) for group in self.groups if not _is_unscored(group)]
        return sum(scores) / len(scores) if scores else 0.0

    def metrics(self) -> dict[str, float]:
        """val/score, val/lost prompts, val/unscored completions; val/SOURCE/score if there are several data sources."""
        unscored = sum(g.unscored if isinstance(g, LostRollout) else self.n - len(g) for g in self.groups)
        out = {"val/score": self.accuracy, "val/unscored": float(unscored)}
        out["val/lost"] = float(sum(isinstance(g, LostRollout) for g in self.groups))
        sources = {_prompt(group).data_source for group in self.groups}
        for source in sorted(sources) if len(sources) > 1 else ():
            part = Evaluation([g for g in self.groups if _prompt(g).data_source == source], self.n)
            out[f"val/{source or 'unnamed'}/score"] = part.accuracy
        return out

    def answers(self) -> list[dict[str, Any]]:
        """The first completion of each prompt: {uid, text, reward}."""
        return [
            {"uid": _prompt(g).uid, "text": "", "reward": 0.0}
            if isinstance(g, LostRollout)
            else {"uid": g[0].prompt.uid, "text": g[0].text, "reward": g[0].reward}
            for g in self.groups
        ]

    @staticmethod
    def _score(group: list[Sample] | LostRollout) -> float:
        return 0.0 if isinstance(group, LostRollout) else sum(s.reward for s in group) / len(group)


def _is_unscored(group: list[Sample] | LostRollout) -> bool:
    return isinstance(group, LostRollout) and group.unscored > 0


def _prompt(group: list[Sample] | LostRollout) -> Prompt:
    return group.prompt if isinstance(group, LostRollout) else group[0].prompt


class EvaluationLost(RuntimeError):
    """No prompt has a score; `by_rewards`: all of them have answers, which no reward could score."""

    def __init__(self, sentence: str, *, by_rewards: bool) -> None:
        super().__init__(sentence)
        self.by_rewards = by_rewards


class Evaluator:
    """Generates completions of held-out prompts: data.val_* and rollout.val_kwargs say which and how many of each.

    Example:

        evaluator.submit()                    # to the servers, with the weights that they hold now
        while not evaluator.ready():
            ...                               # check the servers
        found = evaluator.take()
    """

    def __init__(self, collectors: Collectors, prompts: Sequence[Prompt], config: Config) -> None:
        val = config.rollout.val_kwargs
        self._collectors, self.prompts, self._n = collectors, prompts, val.n
        self._params = SamplingParams(
            temperature=val.temperature,
            top_p=val.top_p,
            max_new_tokens=config.data.max_response_length,
            sampling_seed=config.rollout.seed,
        )
        self._tickets: list[Ticket] = []

    def submit(self) -> None:
        """Start generation, before all that is generated ahead: the trainer waits for the evaluation."""
        self._tickets = self._collectors.submit(self.prompts, n=self._n, params=self._params, urgent=True)

    def ready(self) -> bool:
        """Whether all completions are generated and scored; waits up to 1 s for some of them."""
        done, total = self.progress
        if done < total:
            self._collectors.wait()
            done, total = self.progress
        return done == total

    @property
    def progress(self) -> tuple[int, int]:
        """(finished prompts, all prompts)."""
        return sum(ticket.group is not None for ticket in self._tickets), len(self._tickets)

    def take(self) -> Evaluation:
        """The evaluation, once it is ready.  Raises EvaluationLost if every prompt was lost."""
        groups = [ticket.group for ticket in self._tickets if ticket.group is not None]
        assert len(groups) == len(self._tickets), "an evaluation is taken when it is ready"
        if groups and all(isinstance(group, LostRollout) for group in groups):
            reason = next(group.reason for group in groups if isinstance(group, LostRollout))
            raise EvaluationLost(
                f"every prompt of the evaluation was lost; the first: {reason}",
                by_rewards=all(_is_unscored(group) for group in groups),
            )
        return Evaluation(groups, self._n)


@torch.inference_mode()
def transformers_accuracy(folder: str, prompts: Sequence[Prompt], rewards: Rewards, *, max_new_tokens: int) -> float:
    """Greedy accuracy of an HF folder with transformers' own `generate`; answers that cannot be scored do not count.

    Prompts of equal length share a batch, so nothing is padded.
    """
    tokenizer = load_tokenizer(folder)
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder, config=read_config(folder), dtype=torch.float32).eval()
    by_length: dict[int, list[Prompt]] = {}
    for prompt in prompts:
        by_length.setdefault(len(prompt.token_ids), []).append(prompt)
    answers: list[tuple[Prompt, Completion]] = []
    for length, same in by_length.items():
        show_life()
        ids = torch.tensor([prompt.token_ids for prompt in same])
        written = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_new_tokens
        )
        texts = tokenizer.batch_decode(written[:, length:], skip_special_tokens=True)
        answers += [
            (prompt, Completion([], [], "stop", (VersionSpan(0, 0, 0),), text))
            for prompt, text in zip(same, texts, strict=True)
        ]

    async def score_all() -> list[list[Outcome]]:
        return await asyncio.gather(*(rewards.score(prompt, [answer]) for prompt, answer in answers))

    rewards.start()
    outcomes = [outcome for group in asyncio.run(score_all()) for outcome in group]
    scores = [outcome.reward for outcome in outcomes if not isinstance(outcome, str)]
    return sum(scores) / len(scores) if scores else 0.0


def look_after(servers: Servers, router: Router | None) -> None:
    """Restart servers that died, with the same weights.  Raises ServerDied if no server, or no router, is left.

    The router is told which servers come and go, because it does not notice by itself.
    """
    for event in servers.poll():
        if router is not None:
            (router.add if event.state is State.SERVING else router.remove)(event.url)
        if all(state is State.OUT for state in servers.states):
            raise ServerDied(f"no server is left; {event.reason}")


def main(config: Config) -> int:
    """`megarl evaluate`: score model.path on data.val_files, with the servers and rewards of the configuration."""
    if not config.data.val_files:
        raise ValueError("data.val_files=[]: there is nothing to evaluate; expected at least one file of prompts")
    console = Console()
    load_plugins(config.algorithm.plugins)
    check_rewards(config)
    if reason := check_agents(config):
        console.print(f"warning: {reason}", markup=False, highlight=False)
    with RewardTrial(config) as trial:
        read = read_prompts(config, config.data.val_files, overlong=config.data.overlong_prompts)
        trial.check(read.some(config.reward.try_rows))
    prompts = read.all(config.data.val_max_samples)
    with Infrastructure(config, trains=False) as infrastructure, console.status("starting the servers") as status:
        servers, router = infrastructure.serve(), infrastructure.router
        if router is not None:
            for url in servers.urls:
                router.add(url)
        with closing(
            make_collectors(
                config,
                [router.url] if router else servers.urls,
                infrastructure.server_token,
                reward_url=infrastructure.reward_url,
            )
        ) as collectors:
            evaluator = Evaluator(collectors, prompts, config)
            evaluator.submit()
            while not evaluator.ready():
                look_after(servers, router)
                done, total = evaluator.progress
                status.update(f"evaluating: {done} of {total} prompts")
            found = evaluator.take()
    for name, value in found.metrics().items():
        console.print(f"{name} {value:.4f}", highlight=False)
    return 0
