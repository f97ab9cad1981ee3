"""What the versions of the servers must be able to do for a run."""

from __future__ import annotations

import time
from typing import Any

import pytest
from aiohttp import web
from config_helpers import load
from fake_servers import Writer, serving_in_a_thread, silent

from megarl.rollout.protocol import Abilities, Route
from megarl.servers.server_process import free_ports
from megarl.trainer.servers.abilities import (
    ask_servers,
    check_abilities,
    check_draws_as_asked,
    check_reports_routes,
    check_tells_support,
)

ADAPTERS = ["actor.lora.rank=4", "actor.lora.push=adapter", "rollout.engine=sglang"]


@pytest.mark.parametrize("version", ["0.5.17", "0.5.21"])
def test_adapters_are_not_pushed_to_servers_that_may_never_unload_one(version: str) -> None:
    """One old server among new ones is enough."""
    servers = [Abilities.of("0.5.23"), Abilities.of(version)]
    with pytest.raises(ValueError) as error:
        check_abilities(servers, load(*ADAPTERS), drains=True)
    assert str(error.value) == (
        "actor.lora.push=adapter: this SGLang may wait for ever when an adapter is unloaded; expected merged, or "
        "SGLang 0.5.22 and newer"
    )
    check_abilities(servers, load("actor.lora.rank=4", "rollout.engine=sglang"), drains=True)
    check_abilities([Abilities.of("0.5.22")], load(*ADAPTERS), drains=True)


def test_adapters_of_experts_need_servers_that_take_them() -> None:
    old, words = [Abilities.of("0.5.22")], [*ADAPTERS, "model=deepseek_v3_mini", "trainer.device=cuda"]
    with pytest.raises(ValueError) as error:
        check_abilities(old, load(*words), drains=True)
    assert str(error.value) == (
        "actor.lora.push=adapter: this SGLang serves no adapters of experts or of latent attention; expected merged, "
        "or SGLang 0.5.23 and newer"
    )
    check_abilities([Abilities.of("0.5.23")], load(*words), drains=True)
    check_abilities(old, load(*words, "actor.lora.targets=[o_proj]"), drains=True)


def test_a_lead_needs_the_version_of_each_token_or_a_drain() -> None:
    old, config = [Abilities.of("0.5.18")], load("rollout.ahead=2")
    with pytest.raises(
        ValueError, match=r"rollout\.ahead=2: this SGLang tells only one version a completion; expected 0"
    ):
        check_abilities(old, config, drains=False)
    check_abilities(old, config, drains=True)
    check_abilities(old, load(), drains=False)
    check_abilities([Abilities.of("0.5.20")], config, drains=False)


URLS = [f"http://10.0.0.{number}:30000" for number in range(4)]


def told(*infos: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return dict(zip(URLS, infos, strict=False))


def test_a_server_that_does_not_note_experts_is_found_at_the_start() -> None:
    key = "enable_return_routed_experts"
    check_reports_routes(told({key: True}, {}))
    with pytest.raises(ValueError) as error:
        check_reports_routes(told({key: True}, {}, {key: False}))
    assert str(error.value) == (
        f"actor.router_replay=rollout: {URLS[2]} does not report the experts of tokens; expected a server that was "
        "started with --enable-return-routed-experts"
    )


def test_a_server_whose_experts_are_not_reported_is_found_at_the_start() -> None:
    """It says what it took, also where it chose that itself."""
    reports = {"enable_return_routed_experts": True, "moe_runner_backend": "auto"}
    check_reports_routes(told(reports))
    with pytest.raises(ValueError) as error:
        check_reports_routes(told(reports, reports | {"moe_runner_backend": "triton_kernel"}))
    assert str(error.value) == (
        f"actor.router_replay=rollout: {URLS[1]} computes experts with --moe-runner-backend=triton_kernel, and it "
        "does not report which experts it chooses; expected another one"
    )


def test_servers_that_do_not_tell_from_which_tokens_they_drew_are_found_at_the_start() -> None:
    """SGLang says of how many tokens it tells at most, and older versions nothing; our own has no limit."""
    key, narrow = "sampling_mask_max_tokens", load("rollout.engine=hf", "rollout.top_p=0.9", "rollout.top_k=20")
    alone = load("rollout.engine=hf", "rollout.top_p=0.9")
    given = "rollout.top_p=0.9 and rollout.top_k"
    check_tells_support(told({key: None}, {key: 40}), narrow)
    check_tells_support(told({key: None}), alone)
    for config, info, top_k, most in ((narrow, {key: 39}, 20, 19), (alone, {key: 40}, -1, 20)):
        with pytest.raises(ValueError) as error:
            check_tells_support(told(info), config)
        assert str(error.value) == (
            f"{given}={top_k}: {URLS[0]} tells from which tokens it drew only for a top_k of 1 to {most}; expected "
            "one, or a larger --sampling-mask-max-tokens of the server"
        )
    for info in ({}, {key: "40"}, {key: [40]}, {key: True}):
        with pytest.raises(ValueError) as error:
            check_tells_support(told({key: None}, info), narrow)
        assert str(error.value) == (
            f"{given}=20: {URLS[1]} does not tell exactly from which tokens it drew; expected a server that does, "
            "such as SGLang 0.5.23, or 1.0 and -1"
        )


def test_a_server_that_adds_to_how_tokens_are_drawn_is_found_at_the_start() -> None:
    key = "preferred_sampling_params"
    check_draws_as_asked(told({}, {key: None}))
    with pytest.raises(ValueError) as error:
        check_draws_as_asked(told({}, {key: None}, {key: {"min_p": 0.1}}))
    assert str(error.value) == (
        f'rollout.urls: {URLS[2]} was started with --preferred-sampling-params={{"min_p": 0.1}}: a server would '
        "draw from other logits than those of which the trainer computes log-probs; expected one without it"
    )


@pytest.mark.parametrize(
    ("info", "words"),
    [
        (
            {"enable_hierarchical_cache": True},
            "--enable-hierarchical-cache: KV that comes back from host memory",
        ),
        ({"speculative_algorithm": "EAGLE"}, "--speculative-algorithm: the experts of drafted tokens are not kept;"),
        ({"enable_lmcache": True}, "--enable-lmcache: KV that comes back from elsewhere has lost its experts;"),
        (
            {"radix_cache_backend": "own"},
            "--radix-cache-backend: KV that comes back from elsewhere has lost its experts;",
        ),
        ({"enable_prefill_cp": True}, "--enable-prefill-cp: each GPU notes experts of its part of a prompt, and"),
        ({"enable_two_batch_overlap": True}, "--enable-two-batch-overlap: the experts of one half of a batch are"),
    ],
)
def test_a_server_that_loses_experts_is_found_at_the_start(info: dict[str, Any], words: str) -> None:
    reports = {"enable_return_routed_experts": True, "enable_hierarchical_cache": False, "speculative_algorithm": None}
    check_reports_routes(told(reports))
    with pytest.raises(ValueError, match=f"^actor.router_replay=rollout: {URLS[1]} was started with {words}"):
        check_reports_routes(told(reports, reports | info))


class Reporting(Writer):
    """Says this of itself; None: nothing, for ever."""

    routes = (Route.SERVER_INFO,)

    def __init__(self, info: Any) -> None:
        super().__init__()
        self.info = info

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        return await silent(request) if self.info is None else web.json_response(self.info)


def test_servers_that_say_nothing_cost_one_limit_together_and_the_others_are_heard() -> None:
    (away,) = (f"http://127.0.0.1:{port}" for port in free_ports(["127.0.0.1"]))
    servers = [Reporting({"version": "0.5.23"}), Reporting([1]), *(Reporting(None) for _ in range(10))]
    with serving_in_a_thread(*servers) as (urls, _):
        began = time.monotonic()
        heard, reasons = ask_servers([*urls, away], "", limit_s=4)
        assert time.monotonic() - began < 10 * 4, "they are asked at once"
    assert heard == {urls[0]: {"version": "0.5.23"}}
    assert reasons.keys() == {*urls[1:], away}
    assert reasons[urls[1]] == f"{urls[1]}/server_info answered 200: not a JSON object: '[1]'"
    assert {reasons[url].partition(" ")[2] for url in urls[2:]} == {"failed: no whole reply within 4 s"}
    assert "ConnectError" in reasons[away]
