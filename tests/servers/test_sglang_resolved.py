"""The servers of every recipe and preset, as SGLang's own code resolves them on H100 and on B200; nothing starts."""

import json
import subprocess
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from preset_files import NAMES, cases_of
from tiny_models import add_mtp
from tiny_server import CURRENT, OLD, ROOT, sglang_of
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as ARCHITECTURES

from megarl.arch.hf_config import read_hf_config
from megarl.arch.sglang_config import UNKNOWN
from megarl.arch.sglang_options import TRIED, refused, untried
from megarl.config import Config, config_dir, load_config
from megarl.config.placement import placements
from megarl.data.examples.sizes import TinySizes
from megarl.data.examples.tiny import write_tiny_model
from megarl.servers.launch import EngineLaunch
from megarl.servers.nccl import PAIRED, VARIABLES
from megarl.servers.sglang import sglang_command
from megarl.trainer.servers.make_servers import knowing_its_model, server_launch
from megarl.weights.push.servers import ServerCapabilities

pytestmark = pytest.mark.sglang

SCRIPT = ROOT / "tests" / "helpers" / "resolved_server_args.py"
STAND_INS = ROOT / "megarl" / "servers" / "sglang_cpu"
Asked = tuple[dict[str, Any], dict[str, list[str]]]
RECIPES = sorted(path.stem for path in (config_dir() / "recipe").glob("*.yaml"))


@cache
def configs() -> dict[str, Config]:
    """Of every recipe and preset, but of models so small that our own server has them, and of families without pushes.

    Of a preset's layouts that start the same servers, one is enough.
    """
    words = {name: [f"recipe={name}"] for name in RECIPES}
    seen = set()
    for case in (case for preset in NAMES for case in cases_of(preset)):
        if case.words[-1].endswith("xcpu"):  # a layout of CPUs
            continue
        rollout = {name: value for name, value in case.content.get("rollout", {}).items() if name != "num_servers"}
        servers = (case.preset, str(rollout), case.content["trainer"]["n_gpus_per_node"])
        if servers not in seen:
            words[" ".join(case.words)] = case.words
        seen.add(servers)
    on_gpus = ["data.train_files=[x]", "data.val_files=[x]", "trainer.device=cuda", "model.dtype=bfloat16"]
    found = {name: load_config([*each, *on_gpus], command="train")[0] for name, each in words.items()}
    served = {name: config for name, config in found.items() if config.model.config and config.rollout.engine != "hf"}
    return {name: config for name, config in served.items() if config.model.config["model_type"] not in UNKNOWN}


def launch_of(config: Config, folder: Path, python: str) -> EngineLaunch:
    """The first server; of one over several machines, what its second machine starts."""
    hf = dict(config.model.config)
    hf["architectures"] = [ARCHITECTURES.get(hf["model_type"], "DeepseekV3ForCausalLM")]  # kimi_k2 has the same class
    (folder / "config.json").write_text(json.dumps(hf))
    (machines, gpu), *_ = placements(config, trains=True)
    launch = server_launch(replace(config, model=replace(config.model, path=str(folder))))
    launch = replace(launch, engine="sglang", port=5, group_port=6, python=python, first_gpu=gpu, reads_weights=False)
    if len(machines) == 1:
        return launch
    return replace(launch, num_machines=len(machines), machine=1, meeting_host="10.0.0.1")


@pytest.fixture(scope="module", params=[CURRENT, OLD])
def version(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module", params=["H100", "B200"])
def asked(request: pytest.FixtureRequest, version: str, tmp_path_factory: pytest.TempPathFactory) -> Asked:
    """What SGLang makes of each, and its options; one process for all: its imports take most of the time."""
    root, python = tmp_path_factory.mktemp("resolved"), sglang_of(version)
    inputs, names, environment = dict[str, Any](), dict[str, str](), dict[str, str]()
    for number, (name, config) in enumerate(configs().items()):
        folder = root / str(number)
        folder.mkdir()
        launch = launch_of(config, folder, python)
        # It has no --attn-dp-size, and its transformers does not read the words for layers with indexers.
        if version == OLD and (launch.attention_dp > 1 or launch.has_indexers):
            continue
        command = sglang_command(launch, folder)
        environment = command.environment
        names[name] = str([(folder / "config.json").read_text(), *command.argv]).replace(launch.model_path, "")
        variables = {name: value for name, value in environment.items() if name.startswith(("SGLANG_", "NCCL_"))}
        inputs[names[name]] = {"argv": command.argv[4:], "environment": variables, "builds": True}
    environment |= {"PYTHONPATH": f"{environment['PYTHONPATH']}:{STAND_INS}"}
    words = [python, str(SCRIPT), request.param]
    done = subprocess.run(words, input=json.dumps([*inputs.values()]), env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    *found, spellings = map(json.loads, done.stdout.splitlines())
    answers = dict(zip(inputs, found, strict=True))
    return {name: answers[given] for name, given in names.items()}, spellings


@pytest.fixture
def resolved(asked: Asked) -> dict[str, Any]:
    return asked[0]


def test_every_recipe_and_preset_has_servers_that_start_as_resolved(resolved: dict[str, Any], version: str) -> None:
    """Graphs, loaders and experts are made by SGLang's own code; experts stay as they were loaded."""
    assert not {name: answer["error"] for name, answer in resolved.items() if "error" in answer}
    assert len(resolved) > len(RECIPES)
    for name, answer in resolved.items():
        built, is_colocated = answer["built"], answer["args"]["enable_memory_saver"]
        assert is_colocated == (configs()[name].rollout.placement == "shared"), name
        graphs = {"decode": "FullCudaGraphBackend"}
        assert built["graphs"] == (graphs if is_colocated else graphs | {"prefill": "BreakableCudaGraphBackend"}), name
        assert (built["loader"], built["laid_out_anew"]) == ("DummyModelLoader", []), name
        assert answer["args"]["moe_runner_backend"] == "triton", name
        assert not list(untried(answer["args"])), name


def test_ranks_and_servers_as_resolved_have_one_nccl_environment(resolved: dict[str, Any]) -> None:
    """After SGLang's own _set_envs_and_config, against what a run gives to its ranks."""
    for answer in resolved.values():
        assert {name: answer["built"]["nccl"].get(name) for name in PAIRED} == dict.fromkeys(PAIRED) | VARIABLES


def test_states_without_a_gpu_as_resolved(tmp_path: Path) -> None:
    """SGLang's own choice there ends a server; of what it misreads in a folder of transformers it is told."""
    script = [python := sglang_of(CURRENT), str(SCRIPT), "none"]
    cases, environment = list[dict[str, Any]](), dict[str, str]()
    for family in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"):
        folder = write_tiny_model(tmp_path / family, TinySizes(layers=4), family=family, tied=False)
        launch = EngineLaunch("sglang", str(folder), port=5, group_port=6, python=python, device="cpu")
        (tmp_path / f"{family}_server").mkdir()
        command = sglang_command(knowing_its_model(launch), tmp_path / f"{family}_server")
        argv, environment = command.argv[4:], command.environment
        without = [word for word in argv if word != "--disable-overlap-schedule"]
        cases += [{"argv": words, "environment": {}} for words in (argv, without)]
    done = subprocess.run(script, input=json.dumps(cases), env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    *found, _ = map(json.loads, done.stdout.splitlines())
    for told, untold in zip(found[::2], found[1::2], strict=True):
        args = told["args"]
        wanted = {"mamba_radix_cache_strategy": "no_buffer", "uses_mamba_radix_cache": True, "page_size": 1}
        assert {name: args[name] for name in wanted} == wanted
        assert args["max_mamba_cache_size"] >= 3 * args["max_running_requests"], "else fewer would run"
        assert not list(untried(args))
        assert "extra_buffer requires platform support" in untold["error"]


@pytest.mark.megatron_0_19
def test_mtp_layers_are_drafted_with_as_resolved(tmp_path: Path) -> None:
    """By the folder's own layer, in a chain of drafts, and drawn from the policy: SGLang's own choice on an H100."""
    cases, environment = list[dict[str, Any]](), dict[str, str]()
    for family in ("deepseek_v3", "glm4_moe", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"):
        folder = add_mtp(write_tiny_model(tmp_path / family, TinySizes(layers=4), family=family, tied=False))
        launch = EngineLaunch("sglang", str(folder), port=5, group_port=6, python=sglang_of(CURRENT), device="cuda")
        launch = replace(launch, dtype="bfloat16", args=("--speculative-algorithm", "NEXTN"))
        (tmp_path / f"{family}_server").mkdir()
        command = sglang_command(knowing_its_model(launch), tmp_path / f"{family}_server")
        environment = command.environment | {"PYTHONPATH": f"{command.environment['PYTHONPATH']}:{STAND_INS}"}
        cases.append({"argv": command.argv[4:], "environment": {}})
    words = [sglang_of(CURRENT), str(SCRIPT), "H100"]
    done = subprocess.run(words, input=json.dumps(cases), env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    for case, line in zip(cases, done.stdout.splitlines(), strict=False):
        args = json.loads(line)["args"]
        folder = case["argv"][case["argv"].index("--model-path") + 1]
        assert args["speculative_algorithm"] == "EAGLE"
        assert args["speculative_draft_model_path"] in (None, folder), "None is the model's folder"
        assert (args["speculative_num_steps"], args["speculative_eagle_topk"]) == (3, 1)
        assert not list(untried(args))
        assert ServerCapabilities.read(args | {"version": CURRENT}, read_hf_config(folder)).drafts


def test_options_that_are_refused_are_so_by_every_spelling_as_resolved(asked: Asked) -> None:
    spellings = asked[1]
    for field in (*TRIED, "tp_size", "ep_size", "attn_dp_size", "enable_dp_attention"):
        assert all(list(refused([name, "7"])) for name in spellings.get(field, [])), field
    assert spellings.keys() >= {field for field, option in TRIED.items() if not option.is_new}
    others = set(spellings) - TRIED.keys() - {"tp_size", "ep_size", "attn_dp_size", "enable_dp_attention", "config"}
    assert not [name for field in others for name in spellings[field] if list(refused([name, "7"]))]


def test_a_field_is_new_where_the_old_version_lacks_it(asked: Asked, version: str) -> None:
    news = {field for field, option in TRIED.items() if option.is_new}
    assert TRIED.keys() - asked[1].keys() == (news if version == "0.5.17" else set())
