"""Digests of a push against SGLang's own model classes, built on a CPU: those that it computes on GPUs only."""

import json
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tiny_models import LACKING, add_mtp, write_model
from tiny_server import CURRENT, ROOT, sglang_of

from megarl.arch.hf_config import read_hf_config
from megarl.arch.model_types import SPARSE_LATENT
from megarl.arch.mtp import COUNTS, with_mtp
from megarl.arch.routed_experts import INDEXED_KEYS, IndexedKeys
from megarl.data.examples.sizes import TinySizes
from megarl.data.examples.tiny import write_tiny_model
from megarl.rollout.engine_columns import EngineKeys
from megarl.rollout.wire_columns import read_columns
from megarl.servers.launch import EngineLaunch
from megarl.servers.sglang import sglang_command
from megarl.trainer.servers.make_servers import knowing_its_model
from megarl.weights.mapping.families import table_for, tied
from megarl.weights.mapping.mtp import shared_in_draft
from megarl.weights.mapping.server_map import coordinates, derived_table, server_table
from megarl.weights.push.checks import check_digests
from megarl.weights.push.report import PushError
from megarl.weights.verify.digests import RankDigests

pytestmark = [pytest.mark.sglang, pytest.mark.megatron_0_19]

SCRIPT = ROOT / "tests" / "helpers" / "stock_models.py"
# Without a GPU SGLang rounds sizes of feed-forward layers up to 32.
SIZES: dict[str, Any] = {"intermediate_size": 64, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
DRAFTING = [family for family in COUNTS if family not in (*LACKING, "kimi_k2")]  # whose class is deepseek_v3's
FAMILIES = [*(family for family in SPARSE_LATENT if family not in LACKING), *DRAFTING]


@dataclass(frozen=True)
class Pushed:
    held: dict[str, str]  # by SGLang's own classes
    sent: dict[str, str]  # by our tables
    tied: dict[str, str]
    without: dict[str, str]  # held if one tensor, `lost`, did not arrive
    lost: str
    param: str  # where `lost` is held


def expected(hf: dict[str, Any], weights: dict[str, torch.Tensor]) -> dict[str, str]:
    table = [*server_table("sglang", hf), *derived_table("sglang", hf)]
    rank = RankDigests(table, coordinates(1)[0], {name: tensor.dtype for name, tensor in weights.items()}, "sha256")
    for name, tensor in weights.items():
        rank.add(name, tensor)
    return rank.result()


def answers(cases: list[dict[str, Any]], environment: dict[str, str]) -> list[dict[str, str]]:
    """Of the script, whose processes find each other by a file."""
    words, meeting = [sglang_of(CURRENT), str(SCRIPT)], str(Path(environment["TMPDIR"]) / "meeting")
    text = json.dumps([case | {"meeting": meeting} for case in cases])
    done = subprocess.run(words, input=text, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.fixture(scope="module")
def pushed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pushed]:
    root, python = tmp_path_factory.mktemp("stock"), sglang_of(CURRENT)
    cases, environment, found = list[dict[str, Any]](), dict[str, str](), dict[str, Any]()
    for family in FAMILIES:
        args = ("--disable-shared-experts-fusion",)
        drafts, folder = family in DRAFTING, root / family
        if family in (*SPARSE_LATENT, "deepseek_v3"):  # with the keys that SGLang reads in config.json
            write_tiny_model(folder, TinySizes(layers=4), family=family, tied=False)
        else:
            write_model(folder, family, tied=False, **SIZES)
        if drafts:
            add_mtp(folder)
            args += ("--speculative-algorithm", "NEXTN")
        hf = with_mtp(read_hf_config(folder), "joint") if drafts else read_hf_config(folder)
        generator = torch.Generator().manual_seed(1)
        weights = {
            name: torch.randn(shape, generator=generator).to(torch.float32 if op.keeps_dtype else torch.bfloat16)
            for op in table_for(hf)
            for name, shape in op.hf_shapes.items()
        }
        save_file(weights, root / f"{family}.safetensors")
        launch = EngineLaunch("sglang", str(folder), port=5, group_port=6, dtype="bfloat16", python=python)
        launch = knowing_its_model(replace(launch, device="cuda", args=args))
        (root / f"{family}_server").mkdir()
        command = sglang_command(replace(launch, device="cpu"), root / f"{family}_server")
        environment = command.environment
        lost = next(op for op in server_table("sglang", hf) if ("draft." if drafts else ".indexer.") in op.param)
        name = next(iter(lost.hf_shapes))
        case = {"argv": command.argv[4:], "weights": str(root / f"{family}.safetensors"), "pairs": not drafts}
        cases += [case | {"lost": ""}, case | {"lost": name}]
        found[family] = (expected(hf, weights), tied(hf) | shared_in_draft(hf), name, lost.param)
    held = answers(cases, environment)
    return {
        family: Pushed(whole, sent, names, less, lost, param)
        for (family, (sent, names, lost, param)), whole, less in zip(found.items(), held[::2], held[1::2], strict=True)
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_mtp_and_sparse_attention_of_sglang_hold_what_the_tables_say(pushed: dict[str, Pushed], family: str) -> None:
    case = pushed[family]
    assert "error" not in case.held, case.held["error"]
    check_digests("SGLang", case.held, case.sent, case.tied)
    drafted = [name for name in case.held if name.startswith("draft.")]
    assert bool(drafted) == (family in DRAFTING)


@pytest.mark.parametrize("family", FAMILIES)
def test_mtp_and_sparse_attention_of_sglang_lack_one_tensor(pushed: dict[str, Pushed], family: str) -> None:
    case = pushed[family]
    assert "error" not in case.without, case.without["error"]
    with pytest.raises(PushError, match=case.param):
        check_digests("SGLang", case.without, case.sent, case.tied)


@pytest.mark.parametrize("is_positions", [True, False])
def test_sparse_attention_keys_are_read_as_sglang_reports_them(tmp_path: Path, *, is_positions: bool) -> None:
    """Its own recorder and encoder, of a prompt in two passes and of new tokens.

    Where it fuses two kernels it reports places in its memory instead.
    """
    most, num_asked, num_tokens = 4, 7, 12
    folder = write_tiny_model(tmp_path / "model", family="glm_moe_dsa", tied=False, index_topk=most)
    of = IndexedKeys.of(read_hf_config(folder))
    assert of is not None
    rng = np.random.default_rng(0)
    keys = np.full((num_tokens, of.num_layers, most), -1)
    for position, layer in np.ndindex(keys.shape[:2]):
        few = min(position + 1, most)
        keys[position, layer, :few] = rng.choice(position + 1 if is_positions else 64, few, replace=False)
    launch = EngineLaunch("sglang", str(folder), port=5, group_port=6, dtype="bfloat16", python=sglang_of(CURRENT))
    launch = knowing_its_model(replace(launch, device="cuda", returns_routes=True))
    command = sglang_command(replace(launch, device="cpu"), tmp_path)
    assert command.environment["SGLANG_DSA_FUSE_TOPK"] == "0"
    case = {"argv": command.argv[4:], "keys": keys.tolist(), "num_asked": num_asked}
    (answer,) = answers([case], command.environment)
    assert "error" not in answer, answer["error"]
    meta, wanted = answer | {"finish_reason": {"type": "length"}}, EngineKeys(of)
    assert wanted.request(0) == {"return_indexer_topk": True}
    if not is_positions:
        with pytest.raises(ValueError, match="the keys of a completion's tokens"):
            read_columns(meta, num_asked, num_tokens + 1 - num_asked, [wanted])
        return
    column = read_columns(meta, num_asked, num_tokens + 1 - num_asked, [wanted])[INDEXED_KEYS]
    assert column.dtype == of.dtype
    assert not column[: most + 1].any(), "such a token attends to all before it"
    assert (column[most + 1 :] == keys[most:, list(of.layers)]).all()
