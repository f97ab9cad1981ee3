"""Checks of teachers: what each needs, which samples each teaches, and what does not go together."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from megarl.arch.layout import numbers_of
from megarl.config import names
from megarl.config.schema import Config
from megarl.config.settings import show
from megarl.config.validate.models import config_of_folder, group_of, model_numbers
from megarl.config.validate.rewards import missing_file
from megarl.config.validate.servers import server_misfits


def contradictions(config: Config) -> Iterator[str]:
    """One sentence for each fault."""
    alone = config.algorithm.adv_estimator == names.NO_ADVANTAGES
    if alone and not config.teachers:
        nothing = "every advantage is 0, and there is no teacher to learn from"
        yield f"algorithm.adv_estimator={names.NO_ADVANTAGES}: {nothing}; expected teachers.NAME.model.path=FOLDER"
    elif alone and config.algorithm.filter_groups.enable:
        yield (
            f"algorithm.filter_groups.enable=true: algorithm.adv_estimator={names.NO_ADVANTAGES} learns from teachers, "
            "who teach groups of equal rewards as well; expected false"
        )
    if not config.teachers:
        return
    for name in config.teachers:
        yield from _teacher(config, name)
    yield from _routes(config)
    yield from _schedule(config)
    if config.narrows_sampling:
        # The policy is then renormalised over the tokens that could be drawn, and its teachers are not.
        narrowed = f"rollout.top_p={config.rollout.top_p} and rollout.top_k={config.rollout.top_k}"
        yield f"{narrowed}: teachers speak of the whole vocabulary; expected 1.0 and -1"
    paths = {"actor": config.model.path} | {f"teachers.{name}": t.model.path for name, t in config.teachers.items()}
    top_k = config.distill.top_k
    for role, path in paths.items():
        known = model_numbers(config, role).vocab_size
        if top_k is not None and known is not None and top_k > known:
            yield f"distill.top_k={top_k}: {group_of(role)}.path={path} has {known} tokens; expected fewer, or null"


def _teacher(config: Config, name: str) -> Iterator[str]:
    key, teacher = f"teachers.{name}", config.teachers[name]
    if not teacher.model.path:
        yield f"{key}.model.path is not set: a teacher needs a Hugging Face folder or hub name"
    if teacher.engine != names.MEGATRON:
        yield from _server(config, name)


def _server(config: Config, name: str) -> Iterator[str]:
    """What a server's log-probs of given tokens do not allow."""
    key, teacher = f"teachers.{name}", config.teachers[name]
    said = f"{key}.engine={teacher.engine}"
    if config.divergence_of_vocabulary:
        yield (
            f"distill.top_k=null: {said} reports only its most likely tokens; expected their number, such as 64, "
            f"distill.form=reward, or {key}.engine=megatron"
        )
    if config.rollout.temperature != 1:
        yield (
            f"rollout.temperature={config.rollout.temperature}: {said} gives log-probs of given tokens at temperature "
            f"1; expected 1, or {key}.engine=megatron"
        )
    for url in teacher.server.urls:
        if not url.startswith(("http://", "https://")):
            yield f"{key}.server.urls={show(teacher.server.urls)}: expected http://HOST:PORT or https://HOST"
    if not teacher.server.urls and config.rollout.engine == "hf" and teacher.server.num_gpus > 1:
        yield f"{key}.server.num_gpus={teacher.server.num_gpus}: rollout.engine=hf serves on one; expected 1"
    numbers = numbers_of(config_of_folder(teacher.model.path))
    if not teacher.server.urls and config.rollout.engine != "hf":
        for _, sentence in islice(server_misfits(numbers, teacher.server.num_gpus, 1), 1):
            yield f"{key}.server.num_gpus={sentence}; expected another number of GPUs"
    known = numbers.max_position_embeddings
    keys, longest = config.longest
    if known is not None and longest + 1 > known:  # a request for scores asks for a token more
        yield (
            f"{keys}={longest}: {key}.model.path={teacher.model.path} knows {known} positions "
            f"(max_position_embeddings), of which {said} needs one more than a row has; expected at most {known - 1}"
        )


def _routes(config: Config) -> Iterator[str]:
    """Each sample has at most one teacher."""
    route, of_source = config.distill.route, dict[str, str]()
    if route is not None:
        if ":" not in route:
            yield f"distill.route={route}: expected path/to/file.py:function, or package.module:function"
        yield from missing_file("distill.route", route)
    for name, teacher in config.teachers.items():
        key = f"teachers.{name}.data_sources={show(teacher.data_sources)}"
        if route is not None and teacher.data_sources:
            yield f"{key}: distill.route={route} says which teacher a prompt has; expected []"
        for source in teacher.data_sources or ([""] if route is None else []):
            other = of_source.setdefault(source, name)
            if other != name and source:
                yield f"{key}: teachers.{other} teaches {source} too; expected one teacher for each data_source"
            elif other != name:
                both = f"teachers.{other} and teachers.{name} would both teach what no other teacher does"
                yield f"{key}: {both}; expected the data_source's of at least one of them"


def _schedule(config: Config) -> Iterator[str]:
    distill = config.distill
    if distill.decay_style != "constant" and distill.end_coef is None:
        yield f"distill.decay_style={distill.decay_style}: expected distill.end_coef, the value that it goes to"
    if distill.decay_style == "constant" and distill.end_coef is not None:
        yield f"distill.end_coef={distill.end_coef}: expected distill.decay_style=linear or cosine, which lead to it"
