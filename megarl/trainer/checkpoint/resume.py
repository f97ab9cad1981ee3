"""Resuming: roles, settings that have changed, the ledger of the visits, and the finished groups that waited.

A finished group is used only if this run would generate it with the same settings.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from typing import Any

from megarl.agents.load import without_prefix
from megarl.config import Config, read_yaml
from megarl.config.validate.rewards import names_of
from megarl.data.groups import load_groups
from megarl.data.ledger import Ledger
from megarl.data.readers import content_digest
from megarl.io.durable_files import write_text
from megarl.io.terminal import say
from megarl.rewards import REWARDS, SERVICES
from megarl.roles.handles import Role
from megarl.samples.sample import Sample
from megarl.trainer.checkpoint.checkpoint import ROLLOUTS, Checkpoint, Damaged, changes, read_manifest

# The settings on which a finished group depends: its prompt, its completions with their columns, and its rewards.
_KEYS = (
    "data.prompt_key",
    "data.ground_truth_key",
    "data.system_prompt",
    "data.apply_chat_template_kwargs",
    "data.overlong_prompts",
    "data.max_prompt_length",
    "data.max_response_length",
    "model.tokenizer_path",
    "rollout.engine",
    "rollout.sglang.args",
    "rollout.n",
    "rollout.temperature",
    "rollout.top_p",
    "rollout.top_k",
    *(f"agent.{name}" for name in ("fn", "command", "args", "history", "tool_parser", "max_turns", "max_tokens")),
    *(f"agent.{name}" for name in ("timeout_s", "on_error", "over_limit_reward", "ignore")),
    "reward.fn",
    "reward.special_tokens",
    "reward.weights",
    "reward.by_data_source",
    "reward.audit",
    *(f"reward.judge.{name}" for name in ("url", "model", "prompt", "read", "votes", "request")),
    "reward.model.path",
    "reward.model.engine",
    "reward.model.url",
    "reward.timeout_s",
    "reward.on_error",
)
_MOST_CODE = 1 << 20  # bytes of a file


def generated_with(config: Config, *, greedy: bool) -> dict[str, Any]:
    """What finished groups depend on, as JSON values.

    `greedy`: the estimator wants a greedy completion of each prompt.  Of users' functions the files count too, but not
    the modules that they import.
    """
    keys = [key for key in _KEYS if config.has_agents or not key.startswith("agent.")]
    settings = {key: attrgetter(key)(config) for key in keys}
    files = {fn: content_digest(file) for fn in names_of(config) if (file := _file_of(fn))}
    settings |= {"the file of reward.fn": files}
    if config.actor.router_replay == "rollout":  # with other values completions have no such column
        settings["actor.router_replay"] = config.actor.router_replay
    if config.agent.fn is not None:
        file = _file_of(without_prefix(config.agent.fn))
        settings["the file of agent.fn"] = content_digest(file) if file else None
    if config.agent.command:
        settings["the files of agent.command"] = {word: content_digest(word) for word in _scripts(config)}
    return settings | {"algorithm.adv_estimator (greedy)": greedy}


def announce(checkpoint: Checkpoint, config: Config, num_steps: int) -> None:
    """Print the step to resume from and the settings that differ.

    Raises ValueError for a finished run with other settings: its results must not appear under the new ones.
    """
    folder = config.trainer.run_dir
    file = folder / "config.yaml"
    changed = changes(read_yaml(file), config) if file.exists() else []
    if changed and checkpoint.step >= num_steps:
        raise ValueError(
            f"{folder} is finished, with other settings ({', '.join(changed)}); use another "
            "trainer.experiment_name, more steps, or trainer.resume_mode=disable"
        )
    say(*(f"warning: changed since the run began: {change}" for change in changed))
    say(f"going on from step {checkpoint.step} ({checkpoint.folder})")


def take_over(
    checkpoint: Checkpoint | None,
    fingerprint: str,
    settings: Mapping[str, Any],
    warn: Callable[[str], None],
    left_out: Collection[int] = (),
) -> tuple[Ledger, dict[int, list[Sample]]]:
    """The ledger, and by visit the finished groups of the checkpoint; None: a new ledger.

    `fingerprint`: of the data.  `settings`: `generated_with` of this run.  If the checkpoint has others, its groups are
    dropped and the ledger issues their visits again.  `left_out`: visits that rollbacks have left out.
    Raises ValueError for other data, and for damaged files.
    """
    ledger = Ledger(fingerprint)
    if checkpoint is None:
        ledger.leave_out(left_out)
        return ledger, {}
    waiting, before = load_groups(checkpoint.folder / ROLLOUTS), checkpoint.state["generated_with"]
    changed = [key for key in {**settings, **before} if settings.get(key) != before.get(key)]
    if waiting and changed:
        what = f"the finished groups in {checkpoint.folder} ({len(waiting)}) are dropped and generated again"
        warn(f"{what}, because these settings have changed: {', '.join(changed)}")
        waiting = {}
    waiting = {visit: group for visit, group in waiting.items() if visit not in left_out}
    ledger.load_state_dict(checkpoint.state["ledger"], finished=waiting)
    ledger.leave_out(left_out)
    return ledger, waiting


def restore(checkpoint: Checkpoint, roles: Mapping[str, Role], *, verify: bool) -> None:
    """Load the state of every role.  `verify`: before that, the ranks read all files and compare their SHA-256.

    Raises ValueError if the checkpoint has other roles, Damaged if a file has changed.
    """
    saved = read_manifest(checkpoint.folder)["roles"]
    if saved != sorted(roles):
        raise ValueError(
            f"trainer.resume_mode: {checkpoint.folder} holds {', '.join(saved)}, this run trains "
            f"{', '.join(sorted(roles))}; expected the same roles, or trainer.resume_mode=disable"
        )
    if verify:
        for name, role in roles.items():
            if faults := role.faults(checkpoint.folder / name):
                raise Damaged("; ".join(faults))
    for name, role in roles.items():
        role.restore(checkpoint.folder / name)


def check_is_known(checkpoint: Checkpoint) -> None:
    """Raises ValueError for a checkpoint of `megarl sft`, and for one of an earlier version of megarl."""
    if "examples" in checkpoint.state:
        raise ValueError(
            f"trainer.resume_mode: {checkpoint.folder} is a checkpoint of `megarl sft`; expected one of `megarl "
            "train`, another trainer.experiment_name, or trainer.resume_mode=disable"
        )
    require_state(checkpoint, checkpoint.state, ("ledger", "kl", "spikes", "generated_with", "totals"))
    require_state(checkpoint, checkpoint.state["ledger"], Ledger("").state_dict(), "ledger.")


def require_state(checkpoint: Checkpoint, state: Mapping[str, Any], names: Iterable[str], of: str = "") -> None:
    """Raises ValueError if a part of a checkpoint's state lacks some of these names; `of`: the part's name, a dot."""
    if missing := [of + name for name in names if name not in state]:
        raise ValueError(
            f"trainer.resume_mode: {checkpoint.folder} was saved by an older megarl (its state has no "
            f"{', '.join(missing)}); expected a checkpoint of this version, or trainer.resume_mode=disable"
        )


def keep_code(config: Config, kept: Path) -> None:
    """Write the files of rewards, plug-ins and agents, as they are now, into a JSON file: {name: text}.

    `megarl report` compares them between runs.  Not the modules that they import, no file above a megabyte, and of the
    words of agent.command only scripts: others may hold secrets.
    """
    fns = [*names_of(config), *([without_prefix(config.agent.fn)] if config.agent.fn else [])]
    plugins = [plugin if plugin.endswith(".py") else f"{plugin}:" for plugin in config.algorithm.plugins]
    scripts = [word for word in _scripts(config) if word.endswith((".py", ".sh", ".js", ".ts"))]
    files = [*(_file_of(fn) for fn in fns), *map(_file_of, plugins), *scripts]
    texts: dict[str, str] = {}
    for file in sorted({Path(file).expanduser().resolve() for file in files if file}):
        if file.is_file() and file.stat().st_size <= _MOST_CODE:
            is_named = file.is_relative_to(Path.cwd()) and not file.is_relative_to(kept.parent.resolve())
            texts[str(file.relative_to(Path.cwd())) if is_named else file.name] = file.read_text(errors="replace")
    write_text(kept, json.dumps(texts, ensure_ascii=False, indent=1) + "\n")


def _scripts(config: Config) -> list[str]:
    return [word for word in config.agent.command or () if Path(word).is_file()]


def _file_of(fn: str) -> str | None:
    """The file of a user's function, "path/file.py:function" or "module:function"; None for a built-in one."""
    found = REWARDS.get(fn, fn)
    if not isinstance(found, str):  # registered by a plug-in
        return str(sys.modules[found.__module__].__file__)
    place = found if found.endswith(".py") else found.rpartition(":")[0]
    if fn in REWARDS or fn in SERVICES or not place:
        return None
    if place.endswith(".py"):
        return place
    spec = find_spec(place)
    return spec.origin if spec is not None else None
