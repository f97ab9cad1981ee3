"""`trainer.check_only`: looks at plug-ins, data, rewards and models before a run, and starts nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from difflib import get_close_matches
from itertools import chain
from os.path import expanduser
from pathlib import Path

from megarl.config import Config, used_roles
from megarl.config.idle import idle
from megarl.config.old_log_probs import source_of_old_log_probs
from megarl.config.settings import Faults
from megarl.config.validate.models import MINI_PLACE, group_of, missing_folder, model_of, to_prepare, with_own_models
from megarl.data import FILE_KINDS
from megarl.data.chat import load_tokenizer
from megarl.data.prompts import Prompts, Row
from megarl.data.readers import missing, read_rows
from megarl.plan.command.report import report
from megarl.plugins import load_plugins, user_function
from megarl.terminal import sentences
from megarl.trainer.algorithm import make_algorithm
from megarl.trainer.build import cached_folder, read_prompts
from megarl.trainer.checks.reward_rows import check_truths, say_chosen
from megarl.trainer.checks.reward_trial import RewardTrial
from megarl.trainer.collectors import check_agents, check_rewards
from megarl.trainer.servers.colocation import check_shared_gpus
from megarl.trainer.teachers import check_taught
from megarl.weights.hf.folder import INDEX, SINGLE, open_hf


def main(config: Config) -> int:
    """Print what was looked at.  Raises ConfigError with a sentence for each fault.

    Of a run whose data and models are all on another machine only plug-ins and rewards are looked at.
    """
    faults, console = Faults(), sentences()

    def say(line: str) -> None:
        console.print(line)

    with faults.collect():
        report(config, console)
    with faults.collect():
        check_shared_gpus(config)
    is_loaded = False
    with faults.collect():
        load_plugins(config.algorithm.plugins)
        is_loaded = True
    if is_loaded:
        with faults.collect():
            check_rewards(config)
        with faults.collect():
            algorithm = make_algorithm(config)
            for line in (source_of_old_log_probs(config, algorithm.why_own_pass), *idle(config)):
                say(line)
    _look_at_files(config, say, faults, tries=is_loaded)
    faults.stop_if_any()
    say("nothing was found that would stop this run")
    return 0


def _look_at_files(config: Config, say: Callable[[str], None], faults: Faults, *, tries: bool) -> None:
    """Models, data, and rewards on this data if `tries`."""
    files = [*config.data.train_files, *config.data.val_files]
    folders = {
        role: cached_folder(model_of(config, role).path)
        for role in with_own_models(config, _roles(config))
        if model_of(config, role).path
    }
    if makes := to_prepare(config):
        with faults.collect():
            say(_made_first(config, files))
    elif not any(folders.values()) and not _present(files):
        return say("data and models of this run are not on this machine: they were not looked at")
    for role, folder in folders.items():
        with faults.collect():
            say(_model(config, role, folder))
    faults.sentences += () if makes else missing(files)
    with faults.collect():
        for line in _data(config, folders.get("actor"), faults, tries=tries):
            say(line)


def _roles(config: Config) -> tuple[str, ...]:
    return tuple(used_roles(config, "train"))


def _made_first(config: Config, files: Sequence[str]) -> str:
    """A line on what trainer.prepare makes.  Raises ValueError if there is no such function."""
    place = config.trainer.prepare
    user_function(f"trainer.prepare={place}", f"{place}:prepare")
    models = [f"{group_of(role)}.path={model_of(config, role).path}" for role in to_prepare(config)]
    absent = [file for file in files if file not in _present(files)]
    return f"trainer.prepare={place}: the run calls it first, to make what is not here: {', '.join([*models, *absent])}"


def _model(config: Config, role: str, folder: str | None) -> str:
    """A line on a role's model.  Raises ValueError for weights that are not whole, and for a mistyped folder."""
    path = model_of(config, role).path
    if folder is None:
        return f"{group_of(role)}.path={path}: {_absent(config, path, group_of(role))}"
    if folder != path and not any((Path(folder) / name).exists() for name in (SINGLE, INDEX)):
        return f"{group_of(role)}.path={path}: its weights are downloaded when the run starts"
    with open_hf(folder) as found:
        return f"{group_of(role)}.path={path}: {len(found.shapes):,} tensors"


def _absent(config: Config, path: str, group: str) -> str:
    """Why a model is not there, and what becomes of that.  Raises ValueError if it stops the run."""
    if config.trainer.prepare or path.startswith(MINI_PLACE):
        return "not here yet, the run makes it (so it was not looked at)"
    if sentence := missing_folder(path, f"{group}.path"):
        raise ValueError(sentence)
    here = [str(found.parent) for pattern in ("*", "*/*") for found in Path().glob(f"{pattern}/config.json")]
    near = get_close_matches(path, here, n=1, cutoff=0.8)
    hint = f" (if it is to be a folder: did you mean {near[0]}?)" if near else ""
    return f"no folder here, and no hub name that was downloaded before; the run asks the hub, this did not{hint}"


def _data(config: Config, folder: str | None, faults: Faults, *, tries: bool) -> Iterator[str]:
    """Lines on prompts and rewards.  Raises ValueError for a tokenizer that stops a run.

    Files, rows and rewards that do are among the faults.  `tries`: rewards are tried, as their plug-ins have loaded.
    """
    sets = {name: files for name in ("train", "val") if (files := _present(getattr(config.data, f"{name}_files")))}
    tokenizer = cached_folder(config.model.tokenizer_path) if config.model.tokenizer_path else None
    if tokenizer is None or folder is None:
        for file in chain(*sets.values()):
            with faults.collect():
                read_rows([file], FILE_KINDS)
        yield "without tokenizer and model no prompt was read"
        return
    here = deepcopy(config)
    here.model.path, here.model.tokenizer_path = folder, tokenizer
    here.reward.try_rows *= tries
    load_tokenizer(tokenizer)
    with faults.collect():
        if reason := check_agents(here):
            yield f"warning: {reason}"
    rows: list[Row] = []
    read: list[Prompts] = []
    chosen: list[str] = []
    with RewardTrial(here) as trial:
        for name, files in sets.items():
            prompts: Prompts | None = None
            with faults.collect():
                prompts = read_prompts(here, files, max_rows=here.data.train_max_samples if name == "train" else None)
            if prompts is None:
                continue
            if name == "train":
                with faults.collect():
                    check_taught(here, prompts.data_sources)
            rows += prompts.some(here.reward.try_rows)
            read.append(prompts)
            yield _prompts(f"data.{name}_files", files, prompts)
        say_chosen(here, [question for prompts in read for question in prompts.questions], chosen.append)
        yield from chosen
        with faults.collect():
            check_truths(here, read if tries else [])
        with faults.collect():
            trial.check(rows)
    if trial.is_tried and rows:
        yield f"rewards: tried on {len(rows)} rows"


def _present(files: Sequence[str]) -> list[str]:
    return [file for file in files if Path(expanduser(file)).exists()]


def _prompts(key: str, files: Sequence[str], found: Prompts) -> str:
    more = f", {found.num_filtered:,} are too long and left out" if found.num_filtered else ""
    more += f", {found.num_cut:,} are too long and cut" if found.num_cut else ""
    return f"{key}=[{', '.join(files)}]: {len(found):,} prompts of up to {found.longest:,} tokens{more}"
