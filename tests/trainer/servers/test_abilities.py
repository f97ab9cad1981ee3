"""Which engine serves a run, what its servers must be able to do, and what a run tells its pushes."""

import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from config_helpers import BASE, load
from fake_servers import Telling, serving_in_a_thread

from megarl import cli
from megarl.arch.sglang_options import TRIED
from megarl.config import Config, load_config, to_yaml
from megarl.data.examples.tiny import write_tiny_model
from megarl.rollout.protocol import Abilities, Route
from megarl.rollout.settings import GenerationSettings
from megarl.servers.launch import EngineLaunch
from megarl.servers.server_process import free_ports
from megarl.servers.sglang_environment import PYTHON_VARIABLE
from megarl.trainer.checkpoint.checkpoint import write_manifest
from megarl.trainer.servers.abilities import (
    ask_servers,
    check_abilities,
    check_drafts,
    check_draws_as_asked,
    check_newcomer,
    check_reports_routes,
    check_tells_support,
    check_tried,
    dp_ranks_of,
)
from megarl.trainer.servers.make_servers import chosen_engine, knowing_its_model
from megarl.trainer.servers.pushes import CANARY_TOLERANCE, canary, export_folder, push_settings

FP8 = ("rollout.quantization=fp8", "algorithm.rollout_correction.level=token")
ADAPTERS = ("actor.lora.rank=4", "actor.lora.push=adapter", "rollout.engine=sglang")
CUDA = ("trainer.device=cuda", "model.dtype=bfloat16")
OF_FP8 = (*FP8, "rollout.engine=sglang", "rollout.dtype=bfloat16", *CUDA)
EXPERTS = (*ADAPTERS, "model=deepseek_v3_mini", *CUDA)
FREES = "^actor.lora.push=adapter: .* adapter is unloaded; expected merged, or SGLang 0.5.22 and newer$"
ADAPTS = "^actor.lora.push=adapter: .* adapters of experts .*; expected merged, or SGLang 0.5.23 and newer$"
SPANS = "^rollout.ahead=2: this SGLang reports only one version for each completion; expected 0, .* 0.5.20 and newer$"


@pytest.mark.parametrize(
    ("versions", "words", "drains", "refused"),
    [
        (("0.5.23", "0.5.17"), ADAPTERS, True, FREES),  # one old server among new ones is enough
        (("0.5.21",), ADAPTERS, True, FREES),
        (("0.5.21",), (ADAPTERS[0], ADAPTERS[2]), True, None),
        (("0.5.22",), ADAPTERS, True, None),
        (("0.5.22",), EXPERTS, True, ADAPTS),
        (("0.5.23",), EXPERTS, True, None),
        (("0.5.22",), (*EXPERTS, "actor.lora.targets=[o_proj]"), True, None),
        (("0.5.18",), ("rollout.ahead=2",), False, SPANS),
        (("0.5.18",), ("rollout.ahead=2",), True, None),
        (("0.5.18",), (), False, None),
        (("0.5.20",), ("rollout.ahead=2",), False, None),
        (("0.5.22",), OF_FP8, True, "^rollout.quantization=fp8: .*; expected none, or SGLang 0.5.23 and newer$"),
        (("0.5.23",), OF_FP8, True, None),
    ],
)
def test_a_run_that_needs_more_than_its_servers_can_do_is_refused(
    versions: tuple[str, ...], words: tuple[str, ...], drains: bool, refused: str | None
) -> None:
    """Old servers may never unload an adapter, serve none of experts, or tell one version for a whole completion."""
    with nullcontext() if refused is None else pytest.raises(ValueError, match=refused):
        check_abilities([Abilities.of(version) for version in versions], load(*words), drains=drains)


GOOD, BAD = "http://10.0.0.0:30000", "http://10.0.0.1:30000"
ROUTES = {"enable_return_routed_experts": True, "moe_runner_backend": "auto", "enable_hierarchical_cache": False}


@pytest.mark.parametrize(
    ("info", "words"),
    [
        ({"enable_return_routed_experts": False}, "does not report the experts of tokens; expected .*--enable-return-"),
        ({"enable_hierarchical_cache": True}, "was .* --enable-hierarchical-cache: KV that comes back from host "),
        ({"enable_lmcache": True}, "was .* --enable-lmcache: KV that comes back from elsewhere has lost its experts;"),
        ({"radix_cache_backend": "own"}, "was .* --radix-cache-backend: KV that comes back from elsewhere has lost"),
        ({"enable_prefill_cp": True}, "was .* --enable-prefill-cp: each GPU notes experts of its part of a prompt"),
        ({"enable_two_batch_overlap": True}, "was .* --enable-two-batch-overlap: the experts of one half of a batch"),
    ],
)
def test_a_server_that_does_not_report_experts_or_loses_them_is_found_at_the_start(
    info: dict[str, Any], words: str
) -> None:
    """It says what it took, also where it chose that itself."""
    check_reports_routes({GOOD: ROUTES, BAD: {}})
    with pytest.raises(ValueError, match=f"^actor.router_replay=rollout: {BAD} {words}"):
        check_reports_routes({GOOD: ROUTES, BAD: ROUTES | info})


def test_sparse_attention_without_its_keys_is_found_at_the_start() -> None:
    info = ROUTES | {"enable_return_indexer_topk": False}
    check_reports_routes({GOOD: info})
    with pytest.raises(ValueError, match=f"^actor.router_replay=rollout: {BAD} does not report the keys that indexers"):
        check_reports_routes({GOOD: ROUTES | {"enable_return_indexer_topk": True}, BAD: info}, has_indexers=True)


@pytest.mark.parametrize(
    ("top_k", "info", "words"),
    [
        (20, {"sampling_mask_max_tokens": 39}, "only for a top_k of 1 to 19; expected one, or a larger --sampling-"),
        (-1, {"sampling_mask_max_tokens": 40}, "only for a top_k of 1 to 20; expected one, or a larger --sampling-"),
        *[
            (20, info, "does not report exactly from which tokens it drew; expected a server that does, such as SGLang")
            for info in ({}, *({"sampling_mask_max_tokens": limit} for limit in ("40", [40], True)))
        ],
    ],
)
def test_servers_that_do_not_tell_from_which_tokens_they_drew_are_found_at_the_start(
    top_k: int, info: dict[str, Any], words: str
) -> None:
    """SGLang says of how many tokens it tells at most, and older versions nothing; our own has no limit."""
    config = load("rollout.engine=hf", "rollout.top_p=0.9", f"rollout.top_k={top_k}")
    ours = {"sampling_mask_max_tokens": None}
    check_tells_support({GOOD: ours, BAD: {"sampling_mask_max_tokens": 40} if top_k == 20 else ours}, config)
    with pytest.raises(ValueError, match=f"^rollout.top_p=0.9 and rollout.top_k={top_k}: {BAD} .*{words}"):
        check_tells_support({GOOD: ours, BAD: info}, config)


USUAL = {field: option.tried[0] for field, option in TRIED.items()} | {"version": "0.5.23", "quantization": None}


def test_a_server_with_an_option_that_was_not_tried_is_found_at_the_start() -> None:
    """Whoever gave it, and where SGLang chose it, as it does for experts on Blackwell."""
    other = {"moe_runner_backend": "flashinfer_trtllm", "moe_a2a_backend": "deepep", "speculative_algorithm": "EAGLE3"}
    check_tried({GOOD: USUAL, "http://ours": {"version": "megarl-hf"}})
    check_tried({GOOD: USUAL | {"quantization": "fp8", "load_format": "flash_rl"}})
    for field, option in TRIED.items():
        value = other.get(field, 2)
        said = f"^{BAD} runs with {option.names[0]}={value}: {option.why}; expected {option.expected}$"
        with pytest.raises(ValueError, match=said):
            check_tried({GOOD: USUAL, BAD: USUAL | {field: value}})
        unsaid = {name: told for name, told in USUAL.items() if name != field}
        if not option.is_new:
            with pytest.raises(ValueError, match=f"^{BAD} runs with an unknown {option.names[0]}: "):
                check_tried({BAD: unsaid})
        else:
            check_tried({GOOD: unsaid})
    with pytest.raises(ValueError, match=f"^{BAD} holds weights in fp8, and would quantize the first"):
        check_tried({BAD: USUAL | {"quantization": "fp8", "load_format": "auto"}})


def test_mtp_servers_that_draft_otherwise_than_said_are_found_at_the_start() -> None:
    """A push would miss the one's draft model, and bring the other what it has no place for."""
    drafts, plain = {"speculative_algorithm": "EAGLE"}, {"speculative_algorithm": None}
    check_drafts({GOOD: drafts}, wanted=True)
    check_drafts({GOOD: plain, "http://ours": {}}, wanted=False)
    for info, wanted, said in ((drafts, False, "drafts"), (plain, True, "does not draft")):
        with pytest.raises(ValueError, match=f"^{BAD} {said}, unlike rollout.sglang.args=--speculative-algorithm and"):
            check_drafts({BAD: info}, wanted=wanted)


@pytest.mark.parametrize(
    ("family", "args", "said"),
    [
        ("gpt_oss", (), "without a GPU SGLang has no attention sinks, which gpt_oss needs"),
        ("qwen3", ("--speculative-algorithm", "NEXTN"), "SGLang takes the likeliest token whatever the temperature"),
    ],
)
def test_what_sglang_does_on_gpus_only_is_refused_at_the_start(
    tmp_path: Path, family: str, args: tuple[str, ...], said: str
) -> None:
    launch = EngineLaunch("sglang", str(write_tiny_model(tmp_path / "model", family=family)), device="cpu", args=args)
    with pytest.raises(ValueError, match=f"^rollout.engine=sglang: .*{said}"):
        knowing_its_model(launch)
    assert knowing_its_model(replace(launch, device="cuda")).args == args


def test_a_server_that_adds_to_how_tokens_are_drawn_is_found_at_the_start() -> None:
    key, ours = "preferred_sampling_params", {GOOD: {}, "http://b": {"preferred_sampling_params": None}}
    check_draws_as_asked(ours)
    with pytest.raises(ValueError, match=rf'^rollout.urls: {BAD} .* --{key.replace("_", "-")}={{"min_p": 0.1}}: '):
        check_draws_as_asked({**ours, BAD: {key: {"min_p": 0.1}}})


def test_servers_that_say_nothing_cost_one_limit_together_and_the_others_are_heard() -> None:
    (away,) = (f"http://127.0.0.1:{port}" for port in free_ports(["127.0.0.1"]))
    say: list[Any] = [lambda: {"version": "0.5.23"}, lambda: [1], *[None] * 10]
    servers = [Telling(Route.SERVER_INFO, one) for one in say]
    with serving_in_a_thread(*servers) as (urls, _):
        began = time.monotonic()
        heard, reasons = ask_servers([*urls, away], "", limit_s=2)
        assert time.monotonic() - began < 10 * 2, "they are asked at once"
    assert heard == {urls[0]: {"version": "0.5.23"}}
    assert reasons.keys() == {*urls[1:], away}
    assert reasons[urls[1]] == f"{urls[1]}/server_info answered 200: not a JSON object: '[1]'"
    assert {reasons[url].partition(" ")[2] for url in urls[2:]} == {"failed: no whole reply within 2 s"}
    assert "no connection" in reasons[away]


def test_requests_may_name_data_parallel_ranks_that_every_server_has() -> None:
    groups, replicas, old = {"dp_size": 1, "attn_dp_size": 4}, {"dp_size": 4, "attn_dp_size": None}, {"dp_size": 4}
    assert dp_ranks_of({GOOD: groups, "http://b": replicas, "http://c": old}) == 4
    assert dp_ranks_of({GOOD: groups, BAD: {}}) == dp_ranks_of({GOOD: {}}) == 1

    config = load()
    with serving_in_a_thread(Telling(Route.SERVER_INFO, lambda: USUAL | groups)) as ([url], _):
        for dp_ranks in (4, 1):
            check_newcomer(url, config, "", drains=True, generation=GenerationSettings(60, dp_ranks=dp_ranks))
        with pytest.raises(ValueError, match=f"^{url} has 4 data-parallel ranks: expected 2, as the run's servers$"):
            check_newcomer(url, config, "", drains=True, generation=GenerationSettings(60, dp_ranks=2))


MODEL = ("model.path=x", "data.train_files=y", "model.dtype=bfloat16", "rollout.engine=sglang")
TWO = ("trainer.nnodes=2", "trainer.master_addr=a")


def config_of(*words: str) -> Config:
    return load_config([*MODEL, *words])[0]


@pytest.mark.parametrize(("words", "kind"), [((), "bfloat16"), (FP8, "fp8")])
def test_the_canary_of_quantized_servers_has_a_wider_limit(words: tuple[str, ...], kind: str) -> None:
    actor = SimpleNamespace(log_probs=lambda batch, temperature, inputs: torch.zeros(len(batch.tokens)))
    found = canary(config_of(*words), cast(Any, actor), [5, 6, 7])
    assert (found.tolerance, found.log_probs) == (CANARY_TOLERANCE[kind], (0.0, 0.0))
    assert CANARY_TOLERANCE["bfloat16"] < CANARY_TOLERANCE["fp8"] < 1


def test_quantized_servers_on_other_machines_read_the_check_in_the_runs_folder() -> None:
    for words, is_there in (((), False), (FP8, False), (TWO, False), ((*FP8, *TWO), True)):
        config = config_of(*words)
        assert export_folder(config) == (str(config.trainer.run_dir / "push_check") if is_there else None)


@pytest.mark.parametrize(
    ("words", "mode"),
    [
        ((), "retract"),
        (("rollout.ahead=2",), "in_place"),
        (("rollout.ahead=2", "rollout.update=retract"), "retract"),
        (("actor.router_replay=rollout",), "abort"),
        (("actor.router_replay=rollout", "rollout.ahead=2", "rollout.update=retract"), "abort"),
        (("actor.router_replay=rollout", "rollout.ahead=2"), "in_place"),
        (("actor.router_replay=old",), "retract"),
    ],
)
def test_a_push_loses_no_experts_of_tokens_that_are_written(words: tuple[str, ...], mode: str) -> None:
    """A request that is retracted in a push would report those of the pass that computes its KV again."""
    assert push_settings(config_of(*words), ["http://127.0.0.1:5"], "").pause_mode == mode


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What counts as SGLang's environment, on a machine with a GPU."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho '" + '{"sglang": "0.5.23", "sglang-kernel": "0.4.10"}' + "'\n")
    python.chmod(0o755)
    monkeypatch.setenv(PYTHON_VARIABLE, str(python))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return python


def test_sglang_needs_a_gpu_and_its_environment(python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = f"trainer.default_local_dir={tmp_path}"
    assert chosen_engine(load(here), "train") == ("sglang", f"there is a GPU, and SGLang at {python}")
    assert chosen_engine(load(here, "trainer.device=cpu"), "train") == ("hf", "trainer.device=cpu uses no GPU")
    engine, reason = chosen_engine(load(here, "rollout.sglang.python=/no/where"), "train")
    assert engine == "hf"
    assert reason.startswith("there is a GPU, but no SGLang (rollout.sglang.python=/no/where: no Python there")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert chosen_engine(load(here), "train") == ("hf", "torch finds no GPU here")


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ('echo \'{"sglang": "0.5.23"}\'', "SGLang 0.5.23 for machines without GPU, without the package sglang-kernel;"),
        ("echo '{}'", "no package sglang there;"),
        ("exit 3", "expected a Python that lists its packages, it failed:"),
    ],
    ids=["cpu", "other", "broken"],
)
def test_an_environment_that_cannot_use_a_gpu_is_none(python: Path, tmp_path: Path, said: str, reason: str) -> None:
    python.write_text(f"#!/bin/sh\n{said}\n")
    engine, why = chosen_engine(load(f"trainer.default_local_dir={tmp_path}"), "train")
    assert engine == "hf"
    assert why.startswith(f"there is a GPU, but no SGLang ({python}: {reason}")


def began(config: Config) -> None:
    """A run that stopped after a save."""
    folder = config.trainer.run_dir / "checkpoints" / "step_00000002"
    folder.mkdir(parents=True)
    write_manifest(folder, {"step": 2, "roles": [], "files": {}, "state": {}})
    (config.trainer.run_dir / "config.yaml").write_text(to_yaml(config))


@pytest.mark.usefixtures("python")
def test_a_run_that_goes_on_keeps_its_engine(tmp_path: Path) -> None:
    here = f"trainer.default_local_dir={tmp_path}"
    began(load(here, "rollout.engine=hf"))
    file = load(here).trainer.run_dir / "config.yaml"
    assert chosen_engine(load(here), "train") == ("hf", f"the run that resumes has it in {file}")
    for again in ([here, "trainer.resume_mode=disable"], [here, "trainer.experiment_name=another"]):
        assert chosen_engine(load(*again), "train")[0] == "sglang"
    saved = f"trainer.resume_mode={file.parent}/checkpoints/step_00000002"
    assert chosen_engine(load(here, "trainer.experiment_name=another", saved), "train")[0] == "hf"
    assert chosen_engine(load(here, "data.val_files=[b]", command="evaluate"), "evaluate")[0] == "sglang"


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """The configurations with which commands were run."""
    found: list[Config] = []
    monkeypatch.setattr(cli, "_work_of", lambda command: lambda config: found.append(config) or 0)
    return found


def test_a_command_with_servers_says_which_engine_and_why(
    ran: list[Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.jsonl").touch()
    words = [*BASE, f"trainer.default_local_dir={tmp_path}", "trainer.device=cpu"]
    assert cli.main(["train", *words]) == 0
    assert ran[0].rollout.engine == "hf"
    assert capsys.readouterr().err == "rollout.engine=auto: hf, because trainer.device=cpu uses no GPU\n"
    assert cli.main(["train", *words, "rollout.engine=sglang"]) == 0
    assert ran[1].rollout.engine == "sglang" and not capsys.readouterr().err
    assert cli.main(["train", *words, "rollout.tensor_model_parallel_size=2"]) == 2
    assert "rollout.engine=hf is one process" in capsys.readouterr().err


def test_only_the_first_machine_of_a_run_decides(ran: list[Config], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", *BASE, "trainer.nnodes=2", "trainer.node_rank=1", "trainer.master_addr=10.0.0.1"]) == 0
    assert cli.main(["config", *BASE]) == 0
    assert [config.rollout.engine for config in ran] == ["auto", "auto"]
    assert not capsys.readouterr().err
