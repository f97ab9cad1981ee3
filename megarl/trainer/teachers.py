"""The teachers of a run: which samples each teaches, how much it counts, and what it says of them.

A sample's teacher has a number, from 1 in the order of the configuration; 0 stands for none.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from megarl.algo.distillation import NO_LOG_PROB
from megarl.config import Config
from megarl.config.names import NO_ADVANTAGES
from megarl.config.schema.roles import Distill
from megarl.config.settings import show
from megarl.config.validate.models import config_of_folder
from megarl.data.chat import load_tokenizer
from megarl.group import Group
from megarl.plugins.load import user_function
from megarl.roles.frozen import Teacher
from megarl.roles.settings import Packing
from megarl.roles.teacher_servers import TeacherServers
from megarl.samples.batch import Batch, Stat, Stats
from megarl.samples.sample import Prompt, Sample
from megarl.servers.supervisor import Servers
from megarl.trainer.build import model_folder
from megarl.trainer.servers.make_servers import REQUESTS_OF_TEACHERS, key_of_servers, look_after

T = TypeVar("T")
Route = Callable[[Prompt], str | None]  # the name of a prompt's teacher


@dataclass(frozen=True)
class Teachers:
    """Example: batch, stats = teachers.read(batch, groups, step), before the advantages are estimated."""

    models: Mapping[str, Teacher | TeacherServers]
    coefs: Mapping[str, float]  # of each teacher
    route: Route
    distill: Distill
    num_steps: int  # iterations of the run
    vocab_size: int  # of the policy

    @property
    def on_ranks(self) -> dict[str, Teacher]:
        """Those that run on ranks."""
        return {name: model for name, model in self.models.items() if isinstance(model, Teacher)}

    def read(self, batch: Batch, groups: Sequence[Sequence[Sample]], step: int) -> tuple[Batch, Stats]:
        """Add what the loss or the advantages need of teachers for a whole iteration; needs old_log_probs.

        columns [N]
            teacher         int64, the number of each token's teacher; 0 for tokens that learn nothing from one
            distill_weight  the coefficient of this step times the teacher's own; 0 without a teacher
            teacher_reward  with form=reward: distill_weight (log q - log p_old) of the sampled token
            teacher_ids, teacher_top_log_probs   [N, K] with form=loss and top_k: its most likely tokens
        per_sequence [S]
            teacher         int64, the number of each sample's teacher; 0 if it weighs nothing in this step

        Raises: ValueError for a route to a teacher that does not exist.
        """
        numbers = self._numbers([sample for group in groups for sample in group])
        coef = self.coef(step)
        weights = coef * torch.tensor([0.0, *(self.coefs[name] for name in self.models)])
        asked = torch.where(weights[numbers] != 0, numbers, 0)
        teacher = torch.where(batch.columns["response_mask"] != 0, asked[batch.segment_ids], 0)
        batch = batch.with_per_sequence(teacher=asked).with_columns(teacher=teacher, distill_weight=weights[teacher])
        stats: Stats = {"distill/coef": Stat("mean", coef)}
        for number, name in enumerate(self.models, 1):
            stats[f"distill/{name}/share"] = Stat("mean", float((numbers == number).sum()), len(numbers))
        if self.distill.form == "reward":
            return self._with_reward(batch, stats)
        return batch if self.distill.top_k is None else self._with_top_k(batch, self.distill.top_k), stats

    @property
    def reads_steps(self) -> bool:
        """Whether the loss needs what is too large for an iteration: see `read_step`."""
        return self.distill.form == "loss" and self.distill.top_k is None

    def read_step(self, batch: Batch) -> Batch:
        """Add what the loss needs of teachers for one optimizer step.

        teacher_hidden  [N, H] for a divergence over the vocabulary: see mcore.logprobs.divergence.TeacherStates
        """
        on_ranks: Mapping[str, Any] = self.models  # the configuration allows no others
        said = list(self._said(batch, lambda name, part: on_ranks[name].hidden_states(part)))
        widest = max(model.hidden_size for model in on_ranks.values())
        hidden = torch.zeros(batch.num_tokens, widest, dtype=said[0][1].dtype if said else torch.float32)
        for tokens, states in said:
            hidden[tokens, : states.size(1)] = states
        return batch.with_columns(teacher_hidden=hidden)

    def coef(self, step: int) -> float:
        """The coefficient of an iteration, counted from 0, by the schedule."""
        how, start = self.distill, self.distill.coef
        if how.decay_style == "constant" or how.end_coef is None:
            return start
        passed = min(1.0, step / (how.decay_steps or self.num_steps))
        left = 1 - passed if how.decay_style == "linear" else (1 + math.cos(math.pi * passed)) / 2
        return how.end_coef + (start - how.end_coef) * left

    def require_room(self, longest: int, keys: str) -> None:
        """Raises ValueError for a server that refuses a row of `longest` tokens, which `keys` allow."""
        for model in self.models.values():
            if isinstance(model, TeacherServers):
                model.require_room(longest, keys)

    def close(self) -> None:
        """Close the connections to servers."""
        for model in self.models.values():
            if isinstance(model, TeacherServers):
                model.close()

    def _with_reward(self, batch: Batch, stats: Stats) -> tuple[Batch, Stats]:
        log_probs = torch.zeros(batch.num_tokens)
        for tokens, said in self._said(batch, lambda name, part: self.models[name].log_probs(part)):
            log_probs[tokens] = said
        teacher = batch.columns["teacher"]
        gap = torch.where(teacher > 0, log_probs - batch.columns["old_log_probs"], 0.0)
        found: Stats = {}
        for number, name in enumerate(self.models, 1):
            own = gap[teacher == number].double()
            if len(own):
                found[f"distill/{name}/log_prob_gap"] = Stat("mean", float(own.sum()), len(own))
        return batch.with_columns(teacher_reward=batch.columns["distill_weight"] * gap), stats | found

    def _with_top_k(self, batch: Batch, k: int) -> Batch:
        ids = torch.full((batch.num_tokens, k), -1, dtype=torch.int32)
        log_probs = torch.full((batch.num_tokens, k), NO_LOG_PROB)
        size = self.vocab_size
        for tokens, said in self._said(batch, lambda name, part: self.models[name].top_log_probs(part, k, size)):
            ids[tokens], log_probs[tokens] = said[0].int(), said[1]
        untaught = (batch.columns["teacher"] == 0)[:, None]  # teachers on ranks say something of every token
        ids, log_probs = ids.masked_fill(untaught, -1), log_probs.masked_fill(untaught, NO_LOG_PROB)
        return batch.with_columns(teacher_ids=ids, teacher_top_log_probs=log_probs)

    def _said(self, batch: Batch, ask: Callable[[str, Batch], T]) -> Iterator[tuple[Tensor, T]]:
        """(which of the batch's tokens [N] bool, what their teacher says) for each teacher with a sample."""
        numbers, frame = batch.per_sequence["teacher"], batch.keep_columns("response_mask")
        for number, name in enumerate(self.models, 1):
            members = (numbers == number).nonzero().squeeze(1).tolist()
            if members:
                yield (numbers == number)[batch.segment_ids], ask(name, frame.select(members))

    def _numbers(self, samples: Sequence[Sample]) -> Tensor:
        """[S] int64."""
        known = {name: number for number, name in enumerate(self.models, 1)}
        names = [self.route(sample.prompt) for sample in samples]
        for sample, name in zip(samples, names, strict=True):
            if name is not None and name not in known:
                raise ValueError(
                    f"distill.route={self.distill.route}: it returns {name!r} for prompt {sample.prompt.uid}; expected "
                    f"one of the teachers {', '.join(known)}, or None"
                )
        return torch.tensor([0 if name is None else known[name] for name in names], dtype=torch.int64)


def make_teachers(
    config: Config,
    group_of: Callable[[Any], Group],
    num_steps: int,
    *,
    token: str,
    started: Mapping[str, Servers],
) -> Teachers | None:
    """Teachers, without weights, of a run of `num_steps` iterations; None if it has none.

    `group_of` returns the ranks for the configuration of a role.  `started`: the servers that the run starts for
    teachers, by their names, and `token` the key of these; it may be filled later.
    """
    if not config.teachers:
        return None
    numbers = config_of_folder(model_folder(config.model.path))
    models = {name: _make_teacher(config, name, group_of, token, started) for name in config.teachers}
    coefs = {name: keys.coef for name, keys in config.teachers.items()}
    return Teachers(models, coefs, make_route(config), config.distill, num_steps, numbers["vocab_size"])


def _make_teacher(
    config: Config, name: str, group_of: Callable[[Any], Group], token: str, started: Mapping[str, Servers]
) -> Teacher | TeacherServers:
    keys = config.teachers[name]
    if f"teachers.{name}" in config.teachers_on_ranks:
        limits = keys.ppo_max_token_len_per_gpu, keys.ppo_micro_batch_size_per_gpu
        packing = Packing(*limits, share_prefixes=config.trainer.share_prefixes)
        return Teacher(f"teachers.{name}", group_of(keys), packing, config.rollout.temperature)
    concurrency, timeout_s = REQUESTS_OF_TEACHERS, config.rollout.request_timeout_s
    if keys.server.urls:
        return TeacherServers(lambda: keys.server.urls, key_of_servers(config, name), concurrency, timeout_s)
    return TeacherServers(
        lambda: started[name].urls,
        token,
        concurrency,
        timeout_s,
        look_after=lambda: look_after(started[name], f"teachers.{name}"),
        comes_back_s=config.rollout.start_timeout_s,
    )


def make_route(config: Config) -> Route:
    """Raises ValueError for a function that does not load or does not take a prompt."""
    if (address := config.distill.route) is not None:
        route: Route = user_function(f"distill.route={address}", address)
        try:
            inspect.signature(route).bind(None)
        except TypeError:
            raise ValueError(f"distill.route={address}: expected a function of one argument, the prompt") from None
        return route
    of_source = {source: name for name, teacher in config.teachers.items() for source in teacher.data_sources}
    others = next((name for name, teacher in config.teachers.items() if not teacher.data_sources), None)
    return lambda prompt: of_source.get(prompt.data_source, others)


def check_taught(config: Config, sources: Set[str]) -> None:
    """`sources`: the data_source's of the run's prompts.

    Raises ValueError for a teacher of another one, and where only teachers teach, for one that has no teacher.
    """
    there, found = show(sorted(sources)), set[str]()
    for name, teacher in config.teachers.items():
        found |= set(teacher.data_sources)
        if others := sorted(set(teacher.data_sources) - sources):
            raise ValueError(
                f"teachers.{name}.data_sources={show(teacher.data_sources)}: no prompt of data.train_files has the "
                f"data_source {others[0]}; expected some of {there}"
            )
    everything = config.distill.route is not None or any(not each.data_sources for each in config.teachers.values())
    if config.algorithm.adv_estimator == NO_ADVANTAGES and not everything and (untaught := sorted(sources - found)):
        raise ValueError(
            f"algorithm.adv_estimator={NO_ADVANTAGES}: prompts of the data_source {untaught[0]!r} have no teacher, so "
            f"nothing is learnt from them; expected each of {there} in the data_sources of a teacher"
        )


def check_teachers(config: Config) -> None:
    """Raises ValueError for a teacher of other tokens than the policy's, and for a route or key that is not there."""
    if not config.teachers:
        return
    make_route(config)
    for name in config.teachers:
        key_of_servers(config, name)
    ours = load_tokenizer(model_folder(config.model.tokenizer_path)).get_vocab()
    for name, teacher in config.teachers.items():
        key = f"teachers.{name}.model.path"
        if load_tokenizer(model_folder(teacher.model.path, key)).get_vocab() != ours:
            raise ValueError(
                f"{key}={teacher.model.path}: its tokenizer has other tokens than that of "
                f"{config.model.tokenizer_path}; expected a model of the same tokenizer"
            )
