"""Pushes into stock SGLang with a draft model, on a CPU: all that happens but drafting, for which it takes a GPU."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from push_cases import TOKEN, build, connect, push
from spawn import Ranks
from tiny_models import add_mtp, read_config, write_model
from tiny_server import CURRENT, ROOT, sglang_of

from megarl.arch.layout import Layout
from megarl.arch.mtp import TRAINED_MTP
from megarl.mcore.setup import destroy_groups
from megarl.rollout.client import ServerClient
from megarl.servers import sglang
from megarl.servers.launch import EngineLaunch
from megarl.servers.supervisor import Servers
from megarl.trainer.servers.make_servers import knowing_its_model

pytestmark = [pytest.mark.sglang, pytest.mark.dist, pytest.mark.megatron_0_19]

ONE_STEP = ("--speculative-num-steps=1", "--speculative-eagle-topk=1", "--speculative-num-draft-tokens=2")
ARGS = ("--skip-tokenizer-init", "--speculative-algorithm=NEXTN", *ONE_STEP)


@pytest.fixture(scope="module", params=["glm4_moe", pytest.param("qwen3_5_text", marks=pytest.mark.full)])
def url(request: pytest.FixtureRequest, two_ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("model")
    sizes: dict[str, Any] = {"intermediate_size": 64, "num_hidden_layers": 2, "num_key_value_heads": 2}
    more = {"moe_intermediate_size": 64} if request.param == "glm4_moe" else {}
    add_mtp(write_model(folder, request.param, tied=False, **sizes, **more))
    (folder / "config.json").write_text(json.dumps(read_config(folder) | {TRAINED_MTP: "detached"}))
    launch = EngineLaunch("sglang", str(folder), max_running_requests=8, max_total_tokens=4096, args=ARGS)
    launch = knowing_its_model(replace(launch, python=sglang_of(CURRENT), device="cuda"))
    environment, helpers = sglang.foreign_environment, ROOT / "tests" / "helpers"

    def with_plugin(*args: Any, path: list[Path], plugins: str, **others: Any) -> dict[str, str]:
        return environment(*args, path=[*path, helpers], plugins=f"{plugins}drafts = draft_plugin:setup\n", **others)

    servers = Servers([replace(launch, device="cpu")], TOKEN, folder / "logs")
    with pytest.MonkeyPatch.context() as patch, servers:
        patch.setattr(sglang, "foreign_environment", with_plugin)
        servers.start()
        two_ranks.run(build, str(folder), Layout(tp=2, ep=2, etp=1) if more else Layout(tp=2), timeout_s=240)
        yield servers.urls[0]
        two_ranks.run(connect, [], "auto", {}, timeout_s=120)
        two_ranks.run(destroy_groups)


def pushed(ranks: Ranks, url: str, transport: str, fault: str = "") -> dict[str, Any]:
    ranks.run(connect, [url], transport, {}, timeout_s=120)
    version = int(ServerClient(url, TOKEN).model_info()["weight_version"]) + 1
    return ranks.run(push, version, fault, {}, timeout_s=300)[0]


@pytest.mark.parametrize("transport", ["gathered", "mapped"])
def test_mtp_layers_reach_a_draft_model_and_are_verified(two_ranks: Ranks, url: str, transport: str) -> None:
    report = pushed(two_ranks, url, transport)["report"]
    assert not report.failed and report.transports == {url: transport}
    held = [name for name in ServerClient(url, TOKEN).checksums() if "rotary_emb" not in name]
    drafts = [name for name in held if name.startswith("draft.")]
    shared = ["draft.model.embed_tokens.weight", "draft.lm_head.weight"]  # compared with the model's own
    assert len(drafts) > 10 and report.num_verified == len(held) - len(shared)


def test_mtp_layers_get_no_slices(two_ranks: Ranks, url: str) -> None:
    assert pushed(two_ranks, url, "shared")["report"].transports == {url: "mapped"}
    report = pushed(two_ranks, url, "sharded")["report"]
    assert report.transports == {url: "gathered"}
    assert report.fallbacks[url] == ["sharded: it needs a server without a draft model"]


def test_mtp_layers_that_are_wrong_in_a_draft_model_are_found(two_ranks: Ranks, url: str) -> None:
    """A bit of one tensor that is the draft model's alone; the next push mends it."""
    names = pushed(two_ranks, url, "gathered")["expected"]
    projection = next(name for name in names if name.endswith(("mtp.fc.weight", "eh_proj.weight")))
    wrong = pushed(two_ranks, url, "gathered", f"corrupt-in-server {url} {projection}")
    assert re.search(r"differ: draft\.(fc|model\.eh_proj)\.weight\)", wrong["error"])
    assert not pushed(two_ranks, url, "gathered")["report"].failed
