"""Typed settings without an effect: the conditions of their keys do not hold, or the command does not read them.

A user who types `algorithm.lam=0.9` for GRPO expects an effect; silently ignoring it wastes a run.  Only the command
line is checked: a recipe may contain values for choices that are not used.  A value that switches a thing off is never
refused.  The conditions are those of the schema (`If`):

    KEY == VALUE | VALUE        KEY != VALUE        A or B        a name of CONDITIONS

.NAME is a key of the same group, ROLE.NAME one of the same role.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import yaml

from megarl.config import names
from megarl.config.keys import general, schema_keys
from megarl.config.old_log_probs import why_own_pass
from megarl.config.resolve import data_parallel_size, layout_of
from megarl.config.schema import Config
from megarl.config.schema.record import ALL, NOT_NEGATIVE
from megarl.config.settings import Setting, show
from megarl.config.validate.layouts import LEARNERS
from megarl.config.validate.models import group_of, has_folder
from megarl.config.validate.rewards import names_of, trained_names
from megarl.config.validate.values import is_there, value_of

# Also 0 of numbers from 0 on, and "" where it is the default.
OFF: tuple[Any, ...] = ([], {}, False, None, -1, "off", "none", "never")
COMMANDS_THAT_RUN_NOTHING = ("doctor", "node", "serve")


def without_effect(config: Config, typed: Iterable[Setting], command: str) -> Iterator[str]:
    """One sentence for each typed setting without an effect."""
    if command in COMMANDS_THAT_RUN_NOTHING:
        return
    for setting in (setting for setting in typed if is_there(config, setting.key)):
        known = schema_keys()[general(setting.key)]
        is_off = known.range is NOT_NEGATIVE and setting.value == 0
        is_off |= setting.value == known.default == ""
        if is_off or any(type(setting.value) is type(off) and setting.value == off for off in OFF):
            continue
        reasons = (why_not(config, setting.key, condition) for condition in known.only_if)
        if command in ALL and command not in known.commands:
            yield f"{setting.text}: has no effect, because `megarl {command}` does not read it"
        elif why := next(filter(None, reasons), ""):
            yield f"{setting.text}: has no effect, because {why}"


def why_not(config: Config, key: str, condition: str) -> str:
    """Why a condition of a key does not hold; "" if it does."""
    if condition in CONDITIONS:
        return CONDITIONS[condition](config, key)
    condition = condition.replace("ROLE.", f"{role_of(key)}.").replace("teachers.NAME.", f"{role_of(key)}.")
    unmet = []
    for term in condition.split(" or "):
        of, sign, wanted = term.split(" ", 2)
        value = value_of(config, of)
        if (value in [yaml.safe_load(each) for each in wanted.split(" | ")]) == (sign == "=="):
            return ""
        unmet.append(f"{of}={show(value)}")
    return f"{' and '.join(unmet)}; it needs {condition}"


def role_of(key: str) -> str:
    """ "teachers.math.megatron.param_offload" -> "teachers.math"; "actor.optim.lr" -> "actor"."""
    top, _, rest = key.partition(".")
    return f"{top}.{rest.partition('.')[0]}" if top == "teachers" else top


def _critic(c: Config, key: str) -> str:  # noqa: ARG001
    return "" if c.uses_critic else f"algorithm.adv_estimator={c.algorithm.adv_estimator} needs no critic"


def _reference(c: Config, key: str) -> str:
    if c.uses_reference or (c.scores_on_ranks and not key.startswith("ref.model.")):
        return ""
    return "actor.use_kl_loss and algorithm.use_kl_in_reward are both false, so there is no reference"


def _read_by_estimator(c: Config, key: str) -> str:
    """The needs of a plug-in's estimator are not known here."""
    name, leaf = c.algorithm.adv_estimator, key.rpartition(".")[2]
    reads = leaf in names.SETTINGS_OF_ESTIMATOR.get(name, (leaf,))
    return "" if reads else f"algorithm.adv_estimator={name} does not read it"


def _read_by_loss(c: Config, key: str) -> str:
    loss, leaf = c.algorithm.policy_loss_fn, key.rpartition(".")[2]
    clips = names.CLIPS_OF_LOSS.get(loss)
    reads = clips is None or leaf in clips or (leaf == "clip_ratio" and clips)
    return "" if reads else f"algorithm.policy_loss_fn={loss} does not read it"


def _advantages(c: Config, key: str) -> str:  # noqa: ARG001
    """Without advantages teachers teach by the loss alone."""
    has_none = c.algorithm.adv_estimator == names.NO_ADVANTAGES and c.distill.form == "loss"
    return f"algorithm.adv_estimator={names.NO_ADVANTAGES}: every advantage is 0" if has_none else ""


def _policy_loss(c: Config, key: str) -> str:
    """Losses that clip are products with the advantage."""
    why = _advantages(c, key) if names.CLIPS_OF_LOSS.get(c.algorithm.policy_loss_fn) else ""
    return why and f"{why}, and so is the policy loss"


def _own_pass(c: Config, key: str) -> str:  # noqa: ARG001
    why = why_own_pass(c)
    return f"each iteration makes a forward pass for its old log-probs: {why}" if why else ""


def _learns(c: Config, key: str) -> str:  # noqa: ARG001
    role = role_of(key)
    return "" if role in LEARNERS else f"{'a reference' if role == 'ref' else 'a teacher'} is not trained"


def _copies(c: Config, key: str) -> str:
    """Experts may have copies even if the rest has none: with tp=4, ep=2 and etp=1 each is on two of four ranks."""
    role = role_of(key)
    node, layout = c.role(role), layout_of(c.role(role).megatron)
    of_experts = node.num_ranks // (layout.ep * layout.expert_tp * layout.pp)
    has_one = data_parallel_size(c, role) * layout.cp == 1 and of_experts == 1
    return f"there is one copy of the {role}, so nothing is reduced or gathered" if has_one else ""


def _no_folder(c: Config, key: str) -> str:
    role = role_of(key) if key != "model.config" else "actor"
    model = group_of(role)
    return f"the config.json in {model}.path={value_of(c, f'{model}.path')} counts" if has_folder(c, role) else ""


def _ranks(c: Config, key: str) -> str:
    """Teachers on servers have no ranks."""
    role = role_of(key)
    on_servers = role in c.teacher_roles and c.role(role).engine != names.MEGATRON
    return f"{role}.engine={c.role(role).engine} runs on no ranks" if on_servers else ""


def _servers(c: Config, key: str) -> str:
    """Servers that the run starts, for rollouts, a reward model or a teacher."""
    group = key.rpartition(".")[0]
    node = value_of(c, group)
    if group == "reward.model" and node.engine == names.MEGATRON:
        return f"reward.model.engine={names.MEGATRON} asks no server"
    name = "url" if group == "reward.model" else "urls"
    given = getattr(node, name)
    return f"{group}.{name}={show(given)} names servers that run already" if given else ""


def _gpus(c: Config, key: str) -> str:
    if key.startswith("rollout."):
        return "trainer.device=cpu uses no GPU" if c.trainer.device == "cpu" else ""
    return _servers(c, key)


def _own_server(c: Config, key: str) -> str:
    """A server of the user's, which has a key of its own."""
    group = key.rpartition(".")[0]
    node = value_of(c, group)
    if group == "reward.model" and node.engine == names.MEGATRON:
        return f"reward.model.engine={names.MEGATRON} asks no server"
    name = "urls" if hasattr(node, "urls") else "url"
    starts = group != "reward.judge" and not getattr(node, name)
    return f"{group}.{name}={show(getattr(node, name))}: the run starts a server, and knows its key" if starts else ""


def _compared(c: Config, key: str) -> str:  # noqa: ARG001
    return "" if c.compares_servers else "no collector has two servers to compare"


def _reward(name: str) -> Callable[[Config, str], str]:
    return lambda c, key: "" if name in names_of(c) else f"no reward is called {name}"  # noqa: ARG005


def _async(c: Config, key: str) -> str:  # noqa: ARG001
    return "no reward is async" if all(fn in names.REWARDS for fn in names_of(c)) else ""


def _code(c: Config, key: str) -> str:  # noqa: ARG001
    harmless = {*names.REWARDS, *names.REWARD_SERVICES} - {*names.REWARDS_OF_CODE}
    return "no reward runs code of the model" if names_of(c).keys() <= harmless else ""


def _processes(c: Config, key: str) -> str:
    if key.startswith("reward."):
        return "no reward runs in a process of its own" if names_of(c).keys() <= {*names.REWARD_SERVICES} else ""
    is_adapted = str(c.agent.fn).partition(":")[0] in names.AGENT_ADAPTERS
    return f"agent.fn={c.agent.fn} runs in no process of its own" if is_adapted else ""


def _agents(c: Config, key: str) -> str:  # noqa: ARG001
    return "" if c.has_agents else "agent.fn=null and agent.command=[]: completions are plain"


def _listeners(c: Config, key: str) -> str:  # noqa: ARG001
    listens = c.serves_other_machines or c.rollout.urls
    return "" if listens else "trainer.nnodes=1 and all servers are on this machine"


CONDITIONS: dict[str, Callable[[Config, str], str]] = {  # why the condition does not hold for a key; "" if it does
    "there is a critic": _critic,
    "there is a reference": _reference,
    "the estimator reads it": _read_by_estimator,
    "the loss reads it": _read_by_loss,
    "there are advantages": _advantages,
    "there is a policy loss": _policy_loss,
    "a step gives old log-probs": _own_pass,
    "the role learns": _learns,
    "there are several copies": _copies,
    "the role has ranks": _ranks,
    "the folder is missing": _no_folder,
    "the run starts the servers": _servers,
    "servers use GPUs": _gpus,
    "the server is yours": _own_server,
    "there are servers to compare": _compared,
    "a reward is called judge": _reward("judge"),
    "a reward is called model": _reward("model"),
    "there are several rewards": lambda c, key: "there is one reward" if len(trained_names(c)) == 1 else "",  # noqa: ARG005
    "a reward is async": _async,
    "requests are made": lambda c, key: "" if key.startswith("rollout.") else _async(c, key),
    "a reward runs code": _code,
    "it has processes of its own": _processes,
    "it is an episode, or has processes of its own": lambda c, key: (
        _processes(c, key) if key.startswith("reward.") else ""
    ),
    "there are agents": _agents,
    "there are no agents": lambda c, key: "agents make whole episodes" if c.has_agents else "",  # noqa: ARG005
    "trainer.logger has prometheus": lambda c, key: (
        "" if "prometheus" in c.trainer.logger else "trainer.logger has no prometheus"
    ),  # noqa: ARG005
    "other machines connect": _listeners,
}
