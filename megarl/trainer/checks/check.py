"""`trainer.check_only`: looks at plug-ins, data, rewards and models before a run, and starts nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from difflib import get_close_matches
from os.path import expanduser
from pathlib import Path

from megarl.config import Config, ConfigError, used_roles
from megarl.config.old_log_probs import source_of_old_log_probs
from megarl.config.validate.models import group_of, model_of, with_own_models
from megarl.data.chat import load_tokenizer
from megarl.data.prompts import Prompts, Row
from megarl.plugins import load_plugins
from megarl.terminal import sentences
from megarl.trainer.algorithm import make_algorithm
from megarl.trainer.build import MINI_PLACE, cached_folder, may_be_hub_name, read_prompts
from megarl.trainer.checks.reward_rows import check_truths
from megarl.trainer.checks.reward_trial import RewardTrial
from megarl.trainer.collectors import check_agents, check_rewards
from megarl.trainer.teachers import check_taught
from megarl.weights.hf.folder import INDEX, SINGLE, open_hf


class Faults:
    """One sentence for each thing that would stop the run."""

    def __init__(self) -> None:
        self.sentences: list[str] = []

    @contextmanager
    def collect(self) -> Iterator[None]:
        """A ValueError raised inside is collected, and the code after the block goes on."""
        try:
            yield
        except ValueError as error:
            self.sentences += error.sentences if isinstance(error, ConfigError) else [str(error)]


def main(config: Config) -> int:
    """Print what was looked at.  Raises ConfigError with a sentence for each fault.

    Of a run whose data and models are all on another machine only plug-ins and rewards are looked at.
    """
    faults, console = Faults(), sentences()

    def say(line: str) -> None:
        console.print(line)

    is_loaded = False
    with faults.collect():
        load_plugins(config.algorithm.plugins)
        is_loaded = True
        with faults.collect():
            check_rewards(config)
        with faults.collect():
            algorithm = make_algorithm(config)
            say(source_of_old_log_probs(config, algorithm.why_own_pass))
    files = [*config.data.train_files, *config.data.val_files]
    folders = {role: cached_folder(model_of(config, role).path) for role in with_own_models(config, _roles(config))}
    if not any(folders.values()) and not any(Path(expanduser(file)).exists() for file in files):
        say("data and models of this run are not on this machine: they were not looked at")
    else:
        for role, folder in folders.items():
            with faults.collect():
                say(_model(config, role, folder))
        with faults.collect():
            for line in _data(config, folders["actor"], faults, tries=is_loaded):
                say(line)
    if faults.sentences:
        raise ConfigError(*dict.fromkeys(faults.sentences))
    say("nothing was found that would stop this run")
    return 0


def _roles(config: Config) -> tuple[str, ...]:
    return tuple(used_roles(config, "train"))


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
    if not may_be_hub_name(path):
        raise ValueError(f"{group}.path={path}: no such folder; expected a folder with a config.json, or a hub name")
    here = [str(found.parent) for pattern in ("*", "*/*") for found in Path().glob(f"{pattern}/config.json")]
    near = get_close_matches(path, here, n=1, cutoff=0.8)
    hint = f" (if it is to be a folder: did you mean {near[0]}?)" if near else ""
    return f"no folder here, and no hub name that was downloaded before; the run asks the hub, this did not{hint}"


def _data(config: Config, folder: str | None, faults: Faults, *, tries: bool) -> Iterator[str]:
    """Lines on prompts and rewards.  Raises ValueError for a tokenizer that stops a run.

    Files, rows and rewards that do are among the faults.  `tries`: rewards are tried, as their plug-ins have loaded.
    """
    tokenizer = cached_folder(config.model.tokenizer_path)
    if tokenizer is None or folder is None:
        yield "without tokenizer and model no prompt was read"
        return
    here = deepcopy(config)
    here.model.path, here.model.tokenizer_path = folder, tokenizer
    here.reward.try_rows *= tries
    load_tokenizer(tokenizer)
    if reason := check_agents(here):
        yield f"warning: {reason}"
    rows: list[Row] = []
    read: list[Prompts] = []
    with RewardTrial(here) as trial:
        sets = (("train", here.data.train_files, here.data.train_max_samples), ("val", here.data.val_files, None))
        for name, files, max_rows in sets:
            found: Prompts | None = None
            with faults.collect():
                found = read_prompts(here, files, max_rows=max_rows) if files else None
            if found is None:
                continue
            if name == "train":
                with faults.collect():
                    check_taught(here, found.data_sources)
            rows += found.some(here.reward.try_rows)
            read.append(found)
            yield _prompts(f"data.{name}_files", files, found)
        with faults.collect():
            check_truths(here, read if tries else [])
        with faults.collect():
            trial.check(rows)
    if trial.is_tried and rows:
        yield f"rewards: tried on {len(rows)} rows"


def _prompts(key: str, files: Sequence[str], found: Prompts) -> str:
    more = f", {found.num_filtered:,} are too long and left out" if found.num_filtered else ""
    more += f", {found.num_cut:,} are too long and cut" if found.num_cut else ""
    return f"{key}=[{', '.join(files)}]: {len(found):,} prompts of up to {found.longest:,} tokens{more}"
