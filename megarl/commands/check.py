"""`trainer.check_only`: what a run would refuse, or say, before it trains; nothing is started or written."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from difflib import get_close_matches
from functools import partial
from os.path import expanduser
from pathlib import Path

from megarl.arch.hf_config import read_hf_config
from megarl.arch.mtp import with_mtp
from megarl.commands.this_machine import TRAINS, missing_packages
from megarl.config import Config, used_roles
from megarl.config.names import SUPERVISED
from megarl.config.old_log_probs import source_of_old_log_probs
from megarl.config.settings import Faults
from megarl.config.validate.algorithms import idle
from megarl.config.validate.models import (
    MINI_PLACE,
    group_of,
    missing_folder,
    model_of,
    of_long_rows,
    to_prepare,
    with_own_models,
)
from megarl.data.chat import load_tokenizer
from megarl.data.prompts import PromptRow, Prompts
from megarl.data.readers import missing, read_rows
from megarl.io.terminal import say, sentences
from megarl.plan.predictions import lacks_memory, memory_on_cpu
from megarl.plan.report import report
from megarl.plugins.load import load_plugins, user_function
from megarl.trainer.algorithm import Algorithm, make_algorithm
from megarl.trainer.build import cached_folder, num_iterations, read_prompts
from megarl.trainer.checkpoint.checkpoint import to_resume
from megarl.trainer.checkpoint.resume import check_is_known
from megarl.trainer.checks.reward_trial import RewardTrial
from megarl.trainer.checks.rewards import check_reward_model, check_rewards, check_truths, say_chosen
from megarl.trainer.collectors import check_agents
from megarl.trainer.pairs import Dpo, Rm
from megarl.trainer.servers.colocation import check_shared_gpus, uses_gpus
from megarl.trainer.sft import Sft
from megarl.trainer.stage import read_examples, training_steps
from megarl.trainer.teachers import check_taught, check_teachers
from megarl.trainer.telemetry.profile import check_profile
from megarl.weights.hf.folder import INDEX, SINGLE, HFFolder, files_of_index
from megarl.weights.hf.named import check_complete, check_folder, check_for_sglang, check_tied, open_for, untrained_in
from megarl.weights.mapping.blocks import Role as Kind
from megarl.weights.mapping.families import table_for, tied
from megarl.weights.mapping.names import ShardCoordinate

WHOLE_BYTES = 2 * 2**30  # of weights that are read whole, in a few seconds; of more of them only norms and biases
_say = partial(say, stderr=False)


def main(config: Config, command: str = "train") -> int:
    """Print what was looked at for `megarl COMMAND`.  Raises ConfigError with a sentence for each fault."""
    check = Check(config, command)
    check.layout()
    check.algorithm()
    check.files()
    check.faults.stop_if_any()
    unseen = f"; not checked: {', '.join(check.unseen)}" if check.unseen else ""
    _say(f"nothing was found that would stop this run{unseen}")
    return 0


class Check:
    """What a command would refuse or say of its settings, files and models, before it starts anything."""

    def __init__(self, config: Config, command: str) -> None:
        """`command`: train | sft | dpo | rm | evaluate."""
        self.config, self.command = config, command
        self.faults = Faults()
        self.unseen: list[str] = []  # what is on another machine, or not made yet
        self._algorithm: Algorithm | None = None
        self._tries = False  # rewards, as the plug-ins have loaded

    def layout(self) -> None:
        """Roles, ranks and their memory."""
        config, roles = self.config, used_roles(self.config, self.command)
        if roles:
            with self.faults.collect():
                for line in of_long_rows(config, roles):
                    _say(line)
                report(config, sentences(), self.command)
            with self.faults.collect():
                self._memory()
        if self.command == "train":
            with self.faults.collect():
                check_shared_gpus(config)

    def _memory(self) -> None:
        if not uses_gpus(self.config) and (budget := memory_on_cpu(self.config, self.command)):
            parts = ", ".join(f"{name} {size / 1e9:.1f}" for name, size in budget.items() if name != "total")
            sure = self.config.trainer.device == "cpu"
            where = "on this machine's CPUs" if sure else "if this machine runs it, which has no GPU"
            _say(f"{where}: about {budget['total'] / 1e9:.1f} GB of memory ({parts})")
            if sentence := lacks_memory(budget):
                _say(f"{'warning: ' * sure}{sentence}")

    def algorithm(self) -> None:
        """Plug-ins, rewards, and what the loss layer refuses."""
        config = self.config
        if self.command in SUPERVISED:
            return
        with self.faults.collect():
            load_plugins(config.algorithm.plugins)
            self._tries = True
        if not self._tries:
            return
        with self.faults.collect():
            check_rewards(config)
        if self.command == "train":
            with self.faults.collect():
                self._algorithm = make_algorithm(config)
                for line in (source_of_old_log_probs(config, self._algorithm.why_own_pass), *idle(config)):
                    _say(line)

    def files(self) -> None:
        """Models, data, rewards on this data, and packages of trackers."""
        config, files = self.config, self._data_files()
        roles = with_own_models(config, used_roles(config, self.command) or ("actor",))
        folders = {role: cached_folder(path) for role in roles if (path := model_of(config, role).path)}
        makes = to_prepare(config) if self.command == "train" else []
        lacking = list(missing_packages(config)) if self.command in TRAINS else []
        if makes:
            with self.faults.collect():
                _say(self._made_first(files))
        elif not any(folders.values()) and not _present(files):
            self.unseen += ["models", "data", *(["trackers, of which packages are not here"] if lacking else [])]
            return _say("data and models of this run are not on this machine: they were not looked at")
        self.faults.sentences += lacking
        for role, folder in folders.items():
            with self.faults.collect():
                _say(self._model(role, folder))
        self.faults.sentences += () if makes else missing(files)
        with self.faults.collect():
            self._data(folders.get("actor"))

    def _data_files(self) -> list[str]:
        """The files of prompts or examples that the command reads."""
        return [file for files in self._sets().values() for file in files]

    def _sets(self) -> dict[str, list[str]]:
        """The key of the files of each set -> the files."""
        group = "sft" if self.command in SUPERVISED else "data"
        names = ("val",) if self.command == "evaluate" else ("train", "val")
        return {f"{group}.{name}_files": getattr(getattr(self.config, group), f"{name}_files") for name in names}

    def _made_first(self, files: Sequence[str]) -> str:
        """A line on what trainer.prepare makes.  Raises ValueError if there is no such function."""
        config, place = self.config, self.config.trainer.prepare
        user_function(f"trainer.prepare={place}", f"{place}:prepare")
        made = [f"{group_of(role)}.path={model_of(config, role).path}" for role in to_prepare(config)]
        made += [file for file in files if file not in _present(files)]
        return f"trainer.prepare={place}: the run calls it first, to make what is not here: {', '.join(made)}"

    def _model(self, role: str, folder: str | None) -> str:
        """A line on a role's model.  Raises ValueError for one that its ranks would refuse, and a mistyped folder."""
        path = model_of(self.config, role).path
        place = f"{group_of(role)}.path={path}"
        if folder is None:
            line = f"{place}: {self._absent(path, group_of(role))}"
        elif folder != path and not _is_whole(Path(folder)):
            line = f"{place}: its weights are downloaded when the run starts"
        else:
            kind: Kind = "critic" if role == "critic" or self.command == "rm" else "actor"
            trains = self.command != "evaluate"
            return check_model(self.config, role, folder, kind=kind, trains=trains, serves=self._serves)
        self.unseen.append(place)
        return line

    @property
    def _serves(self) -> bool:
        """Whether servers of the command read the policy's folder: before a first push of whole weights they do not."""
        reads = {"train": not self.config.first_push_is_whole, "evaluate": True}
        return reads.get(self.command, False) and not self.config.rollout.urls

    def _absent(self, path: str, group: str) -> str:
        """Why a model is not there, and what becomes of that.  Raises ValueError if it stops the run."""
        if (self.command == "train" and self.config.trainer.prepare) or path.startswith(MINI_PLACE):
            return "not here yet, the run makes it (so it was not looked at)"
        if sentence := missing_folder(path, f"{group}.path"):
            raise ValueError(sentence)
        here = [str(found.parent) for pattern in ("*", "*/*") for found in Path().glob(f"{pattern}/config.json")]
        near = get_close_matches(path, here, n=1, cutoff=0.8)
        hint = f" (if it is to be a folder: did you mean {near[0]}?)" if near else ""
        return f"no folder here, and no hub name that was downloaded before; the run asks the hub, this did not{hint}"

    def _data(self, folder: str | None) -> None:
        """Prompts and rewards, or examples.  Raises ValueError for a tokenizer that stops a run."""
        sets = {key: files for key, names in self._sets().items() if (files := _present(names))}
        named = self.config.model.tokenizer_path
        tokenizer = cached_folder(named) if named else None
        if tokenizer is not None and tokenizer != named and not any(Path(tokenizer).glob("*token*")):
            tokenizer = None  # of this hub name only other files were downloaded
        if tokenizer is None or folder is None:
            for file in self._data_files():
                with self.faults.collect():
                    read_rows(_present([file]), self.config.data.max_row_bytes)
            self.unseen.append("prompts" if self.command not in SUPERVISED else "examples")
            return _say("without tokenizer and model no prompt was read")
        here = deepcopy(self.config)
        here.model.path, here.model.tokenizer_path = folder, tokenizer
        load_tokenizer(tokenizer)
        if self.command not in SUPERVISED:
            return self._prompts(here, sets)
        stage = {"sft": Sft(), "dpo": Dpo(), "rm": Rm()}[self.command]
        for key, files in sets.items():
            with self.faults.collect():
                examples = read_examples(stage, here, key, files)
                if key == "sft.train_files":
                    stage.check(examples, here)
                    check_profile(here.trainer.profile, training_steps(here, examples), ())

    def _prompts(self, here: Config, sets: dict[str, list[str]]) -> None:
        """Prompts, and rewards on some of them; what else a run asks of its models, tokenizers and save."""
        here.reward.try_rows *= self._tries
        with self.faults.collect():
            if reason := check_agents(here):
                _say(f"warning: {reason}")
        if self.command == "train" and self._algorithm is not None:
            with self.faults.collect():
                check_reward_model(here, wants_greedy=self._algorithm.wants_greedy)
            with self.faults.collect():
                check_teachers(here)
        rows: list[PromptRow] = []
        read: list[Prompts] = []
        with RewardTrial(here) as trial:
            for key, files in sets.items():
                trains, prompts = key == "data.train_files", None
                with self.faults.collect():
                    prompts = read_prompts(here, files, max_rows=here.data.train_max_samples if trains else None)
                if prompts is None:
                    continue
                if trains:
                    with self.faults.collect():
                        self._run(prompts)
                rows += prompts.some(here.reward.try_rows)
                read.append(prompts)
                _say(_prompts(key, files, prompts))
            say_chosen(here, [question for prompts in read for question in prompts.questions], _say)
            with self.faults.collect():
                check_truths(here, read if self._tries else [])
            with self.faults.collect():
                trial.check(rows)
        if trial.is_tried and rows:
            _say(f"rewards: tried on {len(rows)} rows")

    def _run(self, prompts: Prompts) -> None:
        """What a run asks of its training prompts, and the save from which it would go on."""
        config, trainer = self.config, self.config.trainer
        check_taught(config, prompts.data_sources)
        if trainer.saves:
            prompts.check_saveable()
        warmup = 0 if self._algorithm is None else self._algorithm.critic_warmup
        check_profile(trainer.profile, num_iterations(config, len(prompts), warmup), ())
        if (save := to_resume(trainer, _say)) is not None:
            check_is_known(save)
            _say(f"trainer.resume_mode={trainer.resume_mode}: the run goes on from {save.folder}")


def _is_whole(snapshot: Path) -> bool:
    """Whether all weights of a hub name were downloaded."""
    index = snapshot / INDEX
    files = files_of_index(index).values() if index.is_file() else [snapshot / SINGLE]
    return all(file.is_file() for file in files)


def _present(files: Sequence[str]) -> list[str]:
    return [file for file in files if Path(expanduser(file)).exists()]


def _prompts(key: str, files: Sequence[str], found: Prompts) -> str:
    more = f", {found.num_filtered:,} are too long and left out" if found.num_filtered else ""
    more += f", {found.num_cut:,} are too long and cut" if found.num_cut else ""
    more += f"; {found.tools_said}" if found.tools_said else ""
    return f"{key}=[{', '.join(files)}]: {len(found):,} prompts of up to {found.longest:,} tokens{more}"


def check_model(config: Config, role: str, folder: str, *, kind: Kind, trains: bool, serves: bool) -> str:
    """A line on a role's model.  Raises ValueError with the sentence of the ranks or servers that would refuse it.

    As many weights are read as WHOLE_BYTES allow, to find numbers that are not finite.  `trains`: ranks do;
    `serves`: rollout servers read the policy's folder.
    """
    mtp = config.actor.mtp if role == "actor" and trains else "off"
    num_tensors = check_folder(folder, kind, mtp=mtp) if trains else check_complete(folder)
    if serves and role == "actor" and config.rollout.engine != "hf":
        check_for_sglang(folder)
    hf = with_mtp(read_hf_config(folder), mtp)
    with open_for(folder, hf) as held:
        if kind == "actor" and trains:
            check_tied(held, tied(hf), table_for(hf), ShardCoordinate())
        names = _to_read(held, Path(folder))
        for name in names:
            held.read(name, 0, 0, held.shapes[name][0])  # raises for numbers that are not finite
        rest = "" if len(names) == len(held.shapes) else f", of which the norms and biases, {len(names):,}, were read"
    with untrained_in(Path(folder), hf, kind) as others:
        if others.shapes:
            rest += f"; {len(others.shapes):,} (as {next(iter(others.shapes))}) are not trained, and exports copy them"
    return f"{group_of(role)}.path={model_of(config, role).path}: {num_tensors:,} tensors{rest}"


def _to_read(held: HFFolder, folder: Path) -> list[str]:
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    return [name for name, shape in held.shapes.items() if shape and (len(shape) == 1 or size <= WHOLE_BYTES)]
