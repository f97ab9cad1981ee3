"""`megarl launch KIND RECIPE [key=value ...]`: prints the file that submits a run to a cluster, or submits it."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import secrets
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined

from megarl import __version__
from megarl.commands.machines import Machines, machines_of
from megarl.config import Config, layout_word, load_config
from megarl.config.schema import Trainer
from megarl.io.terminal import say
from megarl.plugins.options import Options, count

WITH_KEYS = ("job", "jobset", "trainjob")  # whose pods read a secret of the run's name
ON_KUBERNETES = (*WITH_KEYS, "rayjob")
FILES = {"slurm": "slurm.sbatch", "sky": "sky.yaml"} | {kind: f"{kind}.yaml" for kind in ON_KUBERNETES}
KINDS = (*FILES, "secret", "machines")
DRIVERS = {
    "job": "{name}-0.{name}",
    "jobset": "{name}-trainer-0-0.{name}",
}  # names of the first pod; others are told it
NAME = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
LONGEST_NAME = 40  # a RayJob's may have 47, and what a JobSet makes of it 63
GRACE_S = 540  # trainer.term_grace_s where nobody has set it
SHARED_GB, OTHER_GB = 8, 16  # for each GPU: /dev/shm; Python's processes, servers, and the cache of files
EXPERIMENT = "trainer.experiment_name="
ELEMENT = "%a"  # in words: the number of an array's element, as in Slurm's names of files


class Request(NamedTuple):
    kind: str
    submit: bool
    options: dict[str, Any]  # values of OPTIONS_OF
    settings: list[str]


class Option(NamedTuple):
    kinds: tuple[str, ...]  # that know it
    about: str
    type: Callable[[str], object]


def parse(words: Sequence[str]) -> Request:
    """The kind, its options, and the settings, of which the first may be a recipe's name.  Raises ValueError."""
    given, settings = OPTIONS.values_and_settings(words)
    kind, submit = given.pop("kind"), given.pop("submit")
    for name, option in OPTIONS_OF.items():
        if given[name] is not None and kind not in option.kinds:
            OPTIONS.error(f"--{name.replace('_', '-')}: {kind} has none; expected it with {', '.join(option.kinds)}")
    if submit and kind == "machines":
        OPTIONS.error("--submit: machines are only printed; expected another kind")
    if settings and "=" not in settings[0]:
        settings = [f"recipe={settings[0]}", *settings[1:]]
    return Request(kind, submit, given, settings)


def main(request: Request) -> int:
    """Print the file, or submit it and return the exit code of the program that does."""
    if request.kind == "machines":
        config, warnings = load_config(request.settings)
        _warn(warnings)
        text = json.dumps(machines_of(config, layout_word(request.settings))._asdict()) + "\n"
    elif request.kind == "secret":
        text = _secret(_name(request.options["name"], ""))
    else:
        name, text = launch_file(request)
        if request.submit and request.kind in WITH_KEYS:
            text = f"{_secret(name)}---\n{text}"
    if request.submit:
        return _submit(request.kind, text)
    print(text, end="")
    return 0


def launch_file(request: Request) -> tuple[str, str]:
    """The name of the run on its cluster, and the text that submits it.

    Raises ValueError for a run, or a name, that the cluster cannot have.
    """
    kind, options = request.kind, request.options
    if several := [word for word in request.settings if len(word.splitlines()) > 1]:
        raise ValueError(f"{several[0]!r}: a word of several lines; expected it in a file (--config FILE)")
    element = _first_element(request)
    config, _ = _loaded(request.settings, element)
    if config.trainer.resume_mode == "disable":
        raise ValueError(
            "trainer.resume_mode=disable: a run that is started again would begin anew and drop what it has; expected "
            "auto, with another trainer.experiment_name for a new run"
        )
    if kind == "rayjob" and (changed := [word for word in request.settings if not _passes_rays_shell(word)]):
        raise ValueError(
            f"{changed[0]}: Ray gives its words to a shell again, which would change this one; expected it without "
            "such characters, or in a file (--config FILE)"
        )
    name = _name(options["name"], _experiment(request.settings, config).replace(ELEMENT, ""))
    words = [*request.settings, *_more_words(kind, name, config.trainer)]
    port, machines = options["server_port"] or 30000, options["server_machines"] or 0
    each = _servers_of_a_machine(config, machines) if machines else 0
    hosts = [f"{name}-servers-0-{host}.{name}" for host in range(machines)]  # Slurm's are known when the job has begun
    urls = ",".join(f"https://{host}:{port + index}" for host in hosts for index in range(each))
    of_servers = ["rollout.placement=separate", f"rollout.urls=[{urls}]"] if machines else []
    config, warnings = _loaded([*words, *of_servers], element)
    _warn(warnings)
    values = {
        **{"kind": kind, "name": name, "servers": machines, "servers_each": each, "server_port": port},
        **{"words": words if kind == "slurm" else [*words, *of_servers], "version": __version__},
        "start_probes": math.ceil(config.rollout.start_timeout_s / 30) + 10,
        "grace_s": math.ceil(config.trainer.term_grace_s),
        "entrypoint": shlex.join(["python", "-m", "megarl", "train", "--on", "ray", *words]),
        **_resources(kind, options, machines_of(config, layout_word(words))),
    }
    return name, _rendered(FILES[kind], {**options, **values})


def _first_element(request: Request) -> str | None:
    """Of an array, by which its words are checked."""
    array = request.options["array"]
    first = re.match(r"\d+", array or "")
    if array and not (first and any(ELEMENT in word for word in request.settings if word.startswith(EXPERIMENT))):
        raise ValueError(
            f"--array {array}: each element would be the same run; expected numbers, as 0-3, and {ELEMENT} for an "
            f"element's number in {EXPERIMENT}NAME_{ELEMENT} and in a value, as trainer.seed={ELEMENT}"
        )
    return first[0] if first else None


def _passes_rays_shell(word: str) -> bool:
    """`ray job submit` quotes only words with spaces; what quotes around a file's name are for has been read before."""
    if set(word) & set("$`\\();&|<>*?!#{}") or word.count("'") % 2:
        return False
    return shlex.split(subprocess.list2cmdline([word])) == [word] or word.startswith("recipe=")


def _loaded(words: list[str], element: str | None) -> tuple[Config, list[str]]:
    return load_config([word.replace(ELEMENT, element) for word in words] if element else words)


def _experiment(words: list[str], config: Config) -> str:
    """Its name as it is typed, with %a and without quotes."""
    typed = [word.removeprefix(EXPERIMENT).strip("'\"") for word in words if word.startswith(EXPERIMENT)]
    return typed[-1] if typed else config.trainer.experiment_name


def _more_words(kind: str, name: str, trainer: Trainer) -> Iterator[str]:
    """What only the door knows, where the settings do not say it."""
    if trainer.term_grace_s == Trainer().term_grace_s:
        yield f"trainer.term_grace_s={GRACE_S}"
    if kind in DRIVERS and trainer.num_machines > 1 and trainer.master_addr == Trainer().master_addr:
        yield f"trainer.master_addr={DRIVERS[kind].format(name=name)}"


def _resources(kind: str, options: Mapping[str, Any], wanted: Machines) -> dict[str, Any]:
    """Of the file's machines.  Memory in GB; a run on CPUs gets as much for its ranks as for a GPU."""
    gpu = options["gpu"] or {"a100": "A100-80GB"}.get(wanted.gpu or "", (wanted.gpu or "").upper())
    if kind == "sky" and wanted.gpus and not gpu:
        raise ValueError("megarl launch sky: no layout names the type of GPU; expected --gpu, such as --gpu H100")
    default = "megarl-ray" if kind == "rayjob" else "megarl-server"
    image = options["image"] or (f"{default}:{__version__}" if kind in ON_KUBERNETES else None)
    parts = wanted.gpus or 1
    return {
        **{"gpu": gpu, "gpus": wanted.gpus, "cpus": wanted.cpus, "image": image},
        **{"machines": wanted.nodes + wanted.spares, "spares": wanted.spares},
        **{"memory_gb": (wanted.memory_gb or 0) + (SHARED_GB + OTHER_GB) * parts, "shared_gb": SHARED_GB * parts},
        "python": sys.executable if kind == "slurm" and not image else "python",
        "claim": options["claim"] or "megarl-workspace",
    }


def _warn(warnings: Sequence[str]) -> None:
    for warning in warnings:
        say(f"warning: {warning}")


def _name(given: str | None, experiment: str) -> str:
    """What the run is called on its cluster; all that it makes there begins so."""
    name = given or experiment.lower().replace("_", "-").strip("-")
    if not NAME.fullmatch(name) or len(name) > LONGEST_NAME:
        what = f"--name {name}" if given else f"trainer.experiment_name={experiment}, which makes the name {name!r}"
        rule = f'a letter, then lower-case letters, digits and "-", at most {LONGEST_NAME} in all'
        raise ValueError(f"{what}: expected {rule} (--name)")
    return name


def _servers_of_a_machine(config: Config, machines: int) -> int:
    """As many as its GPUs hold; on CPUs rollout.num_servers in all."""
    gpus, size = config.trainer.n_gpus_per_node, config.rollout.tensor_model_parallel_size
    each = math.ceil(config.rollout.num_servers / machines) if config.trainer.device == "cpu" else gpus // size
    if each == 0:
        raise ValueError(
            f"--server-machines {machines}: rollout.tensor_model_parallel_size={size} and a machine has {gpus} GPUs; "
            "expected no machines of servers alone, as the run itself starts servers over several machines"
        )
    return each


def _secret(name: str) -> str:
    return _rendered("secret.yaml", {"name": name, "key": lambda: secrets.token_hex(32)})


def _rendered(file: str, values: dict[str, Any]) -> str:
    loader = PackageLoader("megarl.commands.launch", "files")
    environment = Environment(
        loader=loader, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
        comment_start_string="{##", comment_end_string="##}",  # {# stands in scripts of bash
    )  # fmt: skip
    environment.filters |= {"text": json.dumps, "argument": _argument, "shell": shlex.quote}
    text = environment.get_template(file).render(values)
    return re.sub(r"\n(\s*\n)+", "\n\n", text) if file.endswith(".sbatch") else re.sub(r"\n\s*\n", "\n", text)


def _argument(word: str) -> str:
    """A word of a container's command in YAML; Kubernetes would replace $(NAME)."""
    return json.dumps(word.replace("$(", "$$("))


def _submit(kind: str, text: str) -> int:
    """Give the text to the program that submits it, and return that one's exit code."""
    tool = {"slurm": "sbatch", "sky": "sky"}.get(kind, "kubectl")
    words = {"sbatch": [], "sky": ["launch", "--secret", "MEGARL_TOKEN"], "kubectl": ["create", "-f"]}[tool]
    if shutil.which(tool) is None:
        raise ValueError(f"megarl launch {kind} --submit: {tool} is not here; expected the file, without --submit")
    environment = {"MEGARL_TOKEN": secrets.token_hex(32), **os.environ} if tool == "sky" else None
    with tempfile.NamedTemporaryFile("w", prefix="megarl_", suffix=f"_{FILES.get(kind, 'secret.yaml')}") as file:
        file.write(text)
        file.flush()
        return subprocess.run([tool, *words, file.name], env=environment, check=False).returncode


def _word(text: str) -> str:
    """A type of arguments."""
    if not re.fullmatch(r"\S+", text):
        raise argparse.ArgumentTypeError(f"{text!r}: expected one word")
    return text


_QUEUED = ("slurm", *ON_KUBERNETES)
OPTIONS_OF = {
    "name": Option((*FILES, "secret"), "of the run on the cluster; unset = as trainer.experiment_name", _word),
    "image": Option(
        tuple(FILES), "of containers; unset = megarl-server, or megarl-ray, on Kubernetes, else none", _word
    ),
    "queue": Option(_QUEUED, "of Kueue; under Slurm the partition", _word),
    "account": Option(("slurm",), "under which Slurm counts the job", _word),
    "time": Option(("slurm",), "limit of Slurm, as 24:00:00", _word),
    "segment": Option(("slurm",), "machines that have to share an NVLink domain, as 18 of an NVL72", count),
    "array": Option(("slurm",), "elements, as 0-3; %a in words is an element's number", _word),
    "mounts": Option(("slurm",), "folders in the image's containers, as /models:/models,/data:/data", _word),
    "claim": Option((*ON_KUBERNETES, "sky"), "the volume at /workspace; unset = megarl-workspace", _word),
    "gpu": Option(("sky",), "SkyPilot's name of the GPU; unset = that of the layout", _word),
    "server_machines": Option(("slurm", "jobset"), "machines more, with servers alone", count),
    "server_port": Option(("slurm", "jobset"), "the first port of servers there; unset = 30000", count),
}
OPTIONS = Options(
    "launch",
    """Prints what submits a run: a script for sbatch, a manifest of Kubernetes (an Indexed Job, a JobSet, Kubeflow's
TrainJob, KubeRay's RayJob), a task of SkyPilot; `secret`: the keys that the pods of a run read; `machines`: what
machines the run wants, as JSON.  All numbers come from the settings.""",
    [
        "megarl launch slurm grpo_qwen2_5_72b_8x8h100 trainer.spare_nodes=1 --queue h100 --time 24:00:00 > run.sbatch",
        "megarl launch jobset grpo_qwen2_5_72b_8x8h100 --server-machines 4 --queue team --submit",
        "megarl launch machines grpo_qwen2_5_72b_8x8h100",
    ],
    usage=f"megarl launch {'|'.join(KINDS)} RECIPE | recipe=NAME | --config FILE [key=value ...] [--option ...]",
)
OPTIONS.add_argument("kind", choices=KINDS)
for _name_of_option, _option in OPTIONS_OF.items():
    _flag, _about = f"--{_name_of_option.replace('_', '-')}", f"{_option.about} ({', '.join(_option.kinds)})"
    OPTIONS.add_argument(_flag, type=_option.type, metavar="X", help=_about.replace("%", "%%"))
OPTIONS.add_argument("--submit", action="store_true", help="by sbatch, kubectl create or sky launch, and print nothing")
