"""Writes the pages of this folder that are made from the code: `python docs/write_pages.py`.

A test compares them with what lies here, so that none of them is ever behind the code.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from draw_system import system

from megarl.agents.fields import FIELDS
from megarl.arch.megatron_fields import TRIED
from megarl.config.describe import Description, records
from megarl.config.names import REWARD_SERVICES
from megarl.config.schema import Algorithm
from megarl.config.schema.record import BASIC
from megarl.config.schema.roles import Distill
from megarl.config.settings import show
from megarl.plugins.declared import REQUIRED, Declared, constant, declared

DOCS = Path(__file__).parent
PACKAGE = DOCS.parent / "megarl"
SANDBOX = DOCS.parent / "megarl_sandbox"
LOSS_LAYER = PACKAGE / "algo/README.md"


def files() -> str:
    """Every file of the two packages with the first line of its docstring, a section for each folder."""
    page = ["# The files of the package", "", _MADE, ""]
    for folder in sorted({path.parent for top in (PACKAGE, SANDBOX) for path in top.rglob("*.py")}):
        paths = sorted(folder.glob("*.py"))
        page += [f"## {folder.relative_to(PACKAGE.parent)}/", ""]
        if (init := folder / "__init__.py") in paths:
            page += [_docstring(init).partition("\n\n")[0].replace("\n", " "), ""]
            paths.remove(init)
        if paths:
            page += ["| file | what it is |", "| --- | --- |"]
            page += [f"| `{path.name}` | {_first_line(path)} |" for path in paths]
            page += [""]
    return "\n".join(page)


def configuration() -> str:
    """Every key of a run, a section for each group of keys."""
    page = ["# Configuration", "", *_CONFIGURATION]
    groups: dict[str, list[tuple[str, list[Description]]]] = {}
    for group, name, keys in records():
        groups.setdefault(group, []).append((name, keys))
    for group, rows in groups.items():
        page += [f"## {group}", "", "| key | meaning | default | unit | allowed | also accepted |"]
        page += ["| --- | --- | --- | --- | --- | --- |"]
        for name, keys in rows:
            first, shown = keys[0], f"**`{name}`**" if keys[0].level == BASIC else f"`{name}`"
            meaning = f"{first.meaning}; only if {first.only_if}" if first.only_if else first.meaning
            spellings = ", ".join(re.sub(r"^\S+", r"`\g<0>`", other) for key in keys for other in key.spellings)
            is_listed = any(first.key in listed for listed in _CHOICES)  # so that one page has each name, and not two
            allowed = "[names](algorithms.md)" if is_listed else first.allowed or first.kind
            allowed += ", or a plug-in's name" if is_listed and "plug-in" in first.allowed else ""
            cells = (shown, meaning, _defaults(keys), first.unit, allowed, spellings)
            page.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
        page += [""]
    page += [
        "## Fields of Megatron's own",
        "",
        *_FIELDS,
        "| in | field | what it does | value |",
        "| --- | --- | --- | --- |",
    ]
    page += [
        f"| `{group}` | `{name}` | {field.does} | {field.wanted} |"
        for group, fields in TRIED.items()
        for name, field in fields.items()
    ]
    page += [""]
    return "\n".join(page)


def _defaults(keys: list[Description]) -> str:
    """The default of the first key, and those of the others that differ."""
    first, *others = keys
    follow = f"= {first.key}"
    differing = {key.default: key.key for key in reversed(others) if key.default not in (first.default, follow)}
    own = [f"`{key}`: `{default}`" for default, key in reversed(differing.items())]
    follows = ["the others follow it"] if any(key.default == follow for key in others) else []
    return "; ".join([f"`{first.default}`", *own, *follows])


_FIELDS = """\
All that can be set. Each was run here and gives the same gradient and the same steps, but those of the optimizer,
which need a GPU. Every other field of Megatron's classes is refused: a run sets it itself, or was never tried with it.

""".splitlines()
_MADE = "Made from the docstrings by `python docs/write_pages.py`."
_CONFIGURATION = """\
Made from `megarl/config/schema/` by `python docs/write_pages.py`. `megarl config --help KEY` prints a row of it;
`megarl config recipe=NAME` prints the values that a run gets. `megarl --help` prints the basic keys, which are bold
here. A key that several groups have, such as `{actor,critic}.optim.lr`, stands once.

Later layers win: the defaults below, a preset (`model=NAME`, `layout=GPUSxGB`), a recipe (`recipe=NAME`), your own file
(`--config FILE`), the command line. A default `= other.key` follows that key unless it is set; `null` leaves a key
open, or empties it. An unknown key and a value of another type or outside of its range are refused before anything
starts, and so is a typed key that would do nothing.

The groups `actor`, `rollout`, `ref` and `model` are verl's; `actor_rollout_ref.` in front of a key is accepted and
dropped. [coming_from/verl.md](coming_from/verl.md) has the differences. A spelling with `(entry NAME)` sets only that
entry of the list or mapping.

Where names have "any value", it may be a list or a mapping: `agent.args={cfg:{a:{b:1}}}` and `agent.args.cfg.a.b=1` are
the same, in a file too. A later layer adds its names to those below it; an empty mapping leaves none of them.

""".splitlines()


def loss_layer() -> str:
    """The page of the loss layer, with its tables of choices made from the functions and their decorators."""
    page = LOSS_LAYER.read_text()
    for heading, decorator, where in (
        ("Policy losses", "register_policy_loss", "algo/losses"),
        ("KL estimators", "register_kl", "algo/kl.py"),
        ("Divergences", "register_divergence", "algo/divergences.py"),
        ("Aggregation", "register_agg_mode", "algo/aggregate.py"),
        ("Advantage estimators", "register_adv_est", "algo/advantages"),
    ):
        before, found, rest = page.partition(f"\n## {heading}\n")
        assert found, f"{LOSS_LAYER} has no section {heading}"
        rows = [_row(one, decorator) for one in dict.fromkeys(declared(decorator, where).values())]
        has_settings = any("settings" in row for row in rows)
        columns = ["name", "what it computes", *(["settings, with their defaults"] if has_settings else []), "when"]
        lines = [f"| {' | '.join(columns)} |", f"|{' --- |' * len(columns)}"]
        lines += [f"| {' | '.join(row.values())} |" for row in rows]
        page = before + found + _with_table(rest, lines)
    return page


def algorithms() -> str:
    """The page of losses and estimators, with its table of names made from the decorators."""
    rows = [(", ".join(f"`{key}`" for key in keys), names()) for keys, names in _CHOICES.items()]
    lines = [f"| {' | '.join(row)} |" for row in (("key", "one of"), ("---", "---"), *rows)]
    return _with_table((DOCS / "algorithms.md").read_text(), lines)


def agent_requests() -> str:
    """What the endpoint of agents does with each field of a request."""
    page = ["# My agent sends X", "", *_REQUESTS]
    for rule, heading in _RULES.items():
        page += [f"## {heading}", "", "| field | of | what is done | values that need no word |"]
        page += ["| --- | --- | --- | --- |"]
        rows: dict[tuple[str, ...], list[str]] = {}
        for field in FIELDS.values():
            if field.rule == rule:
                apis = ", ".join(_APIS[api] for api in field.apis) or "all"
                does = field.does.replace("{name}={run}", "its own value").replace("{run}", "the run's")
                taken = " ".join(f"`{json.dumps(value)}`" for value in field.taken)
                rows.setdefault((apis, does, taken), []).append(f"`{field.name}`")
        page += [f"| {' | '.join([', '.join(names), *cells])} |" for cells, names in rows.items()]
        page += [""]
    return "\n".join(page)


_APIS = {
    "chat": "chat completions",
    "responses": "responses",
    "messages": "messages",
    "text": "completions",
    "ids": "ids",
    "sampling": "`sampling_params` of ids",
}
_RULES = {
    "served": "Served: it changes nothing of the policy",
    "after": "Served after sampling, or not enforced: said once",
    "run": "The run's own value: others are refused, or replaced by `agent.ignore`",
    "none": "Refused, but for these values",
    "read": "Read, as the API says",
}
_REQUESTS = """\
Made from `megarl/agents/fields.py` by `python docs/write_pages.py`. What an agent teaches is exact only if the model
sampled as the run says, so each field of a request has one of these rules: in OpenAI's chat completions, completions
and responses, in Anthropic's messages, and where ids are asked for (`/inference/v1/generate`). `null` is
allowed for all but the model and the messages; a field that is not here is refused with one sentence.
[Agents](agents.md) has all else.

| your agent | do |
| --- | --- |
| always sends a temperature, a seed, or a model's name | `agent.ignore=[temperature,seed,model]`: the run's values \
replace them, and `logs/collector.log` says so once |
| wants a structured answer, or a certain call | nothing: the model sees the tools and your prompt, and learns the \
form by the reward |
| has tools of a provider (web search, a code interpreter) | give it functions of its own: the others are left out |
| counts on a provider's memory (`previous_response_id`, `item_reference`) | nothing: an episode remembers its answers |
| stops at a text (`stop`) | nothing: the agent reads the answer up to it; the model's history has all that it wrote |
| sends images | it cannot be served: the policy reads text |
| shortens its history when it is too long | nothing: errors of length begin with "prompt is too long", and OpenAI's \
have the code `context_length_exceeded` |

A refusal is counted in `agent/refused`; the first ten are in `logs/collector.log`, and the first is on the console.

""".splitlines()


def _with_table(page: str, lines: list[str]) -> str:
    """The page with these lines in place of its first table."""
    table = "".join(f"{line}\n" for line in lines)
    return re.sub(r"(?:^\|.*\n)+", lambda _: table, page, count=1, flags=re.M)


def _names(decorator: str, where: str) -> str:
    """Each function's name, its aliases in brackets."""
    found = [one.names for one in dict.fromkeys(declared(decorator, where).values())]
    shown = [[f"`{name}`" for name in names] for names in found]
    return ", ".join(first + (f" ({', '.join(others)})" if others else "") for first, *others in shown)


# Keys whose values are the names of functions -> the names, for a page.
_CHOICES: dict[tuple[str, ...], Callable[[], str]] = {
    ("algorithm.policy_loss_fn",): lambda: _names("register_policy_loss", "algo/losses"),
    ("algorithm.adv_estimator",): lambda: _names("register_adv_est", "algo/advantages"),
    ("actor.kl_loss_type", "algorithm.kl_penalty"): lambda: f"{_names('register_kl', 'algo/kl.py')}, `full`; {_PLUS}",
    ("distill.divergence",): lambda: _names("register_divergence", "algo/divergences.py"),
    ("actor.loss_agg_mode",): lambda: _names("register_agg_mode", "algo/aggregate.py"),
    ("reward.fn",): lambda: (
        f"{_names('register_reward', 'rewards/functions')}, {', '.join(f'`{name}`' for name in REWARD_SERVICES)}, "
        "`path/to/file.py:function`"
    ),
}
_PLUS = "in the loss each with `+` for the gradient of `k2`; `full` is exact, over the vocabulary"


def _row(one: Declared, decorator: str) -> dict[str, str]:
    """A function's names, the formula and papers of its docstring, its settings, and the paragraph "When:"."""
    paragraphs = [" ".join(part.split()) for part in one.doc.split("\n\n")]
    (when,) = (part.removeprefix("When: ").rstrip(".") for part in paragraphs if part.startswith("When: "))
    what = paragraphs[0].rstrip(".")
    if len(paragraphs) > 1 and " = " in paragraphs[1]:
        formula = "; ".join(" ".join(line.split()) for line in one.doc.split("\n\n")[1].splitlines())
        what += f": `{formula}`"
    papers = [number for number in dict.fromkeys(re.findall(r"arXiv:([\d.]+\d)", one.doc)) if number not in what + when]
    links = [f"[{number}](https://arxiv.org/abs/{number})" for number in papers]
    links += [f"[doi](https://doi.org/{name})" for name in re.findall(r"doi:([\w./]+\w)", one.doc)]
    row = {
        "name": ", ".join(f"`{name}`" for name in one.names),
        "what": what + (f" ({', '.join(links)})" if links else ""),
    }
    if decorator in _SETTINGS:
        row["settings"] = ", ".join(_SETTINGS[decorator](one))
    row["when"] = when
    linked = {name: re.sub(r"arXiv:([\d.]+\d)", r"[\1](https://arxiv.org/abs/\1)", cell) for name, cell in row.items()}
    return {name: cell.replace("|", r"\|") for name, cell in linked.items()}


def _settings_of_loss(one: Declared) -> Iterator[str]:
    clips = constant("algo/hyperparameters.py", "CLIP_KEYS")
    for name, default in one.settings.items():
        key = f"actor.{clips[name]}" if name in clips else f"algorithm.policy_loss_args.{name}"
        yield f"`{key}` (no default)" if default == REQUIRED else f"`{key}={default}`"


def _settings_of_estimator(one: Declared) -> Iterator[str]:
    for name in one.settings:
        default = show(getattr(Algorithm(), name))
        yield f"`algorithm.{name}`" if name == "reward_weights" else f"`algorithm.{name}={default}`"


def _settings_of_divergence(one: Declared) -> Iterator[str]:
    for name in one.settings:
        yield f"`distill.{name}={show(getattr(Distill(), name))}`"


_SETTINGS: dict[str, Callable[[Declared], Iterator[str]]] = {
    "register_policy_loss": _settings_of_loss,
    "register_adv_est": _settings_of_estimator,
    "register_divergence": _settings_of_divergence,
}
PAGES: dict[str, Callable[[], str]] = {
    "files.md": files,
    "configuration.md": configuration,
    "algorithms.md": algorithms,
    "agent_requests.md": agent_requests,
    "../megarl/algo/README.md": loss_layer,
    "images/system.svg": system,
}


def _docstring(path: Path) -> str:
    found = ast.get_docstring(ast.parse(path.read_text()))
    assert found, f"{path} has no docstring"
    return found


def _first_line(path: Path) -> str:
    return _docstring(path).partition("\n")[0].replace("|", r"\|")


if __name__ == "__main__":
    for name, make in PAGES.items():
        (DOCS / name).write_text(make())
