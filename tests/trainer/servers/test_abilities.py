"""What the versions of the servers must be able to do for a run."""

from __future__ import annotations

from typing import Any

import pytest
from aiohttp import web
from config_helpers import load
from fake_servers import Writer, serving_in_a_thread

from megarl.rollout.protocol import Abilities, Route
from megarl.trainer.servers.abilities import (
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


class Reporting(Writer):
    """Says what it was started with."""

    routes = (Route.SERVER_INFO,)

    def __init__(self, info: dict[str, Any]) -> None:
        super().__init__()
        self.info = info

    async def __call__(self, request: web.Request) -> web.Response:  # noqa: ARG002
        return web.json_response(self.info)


def test_a_server_that_does_not_note_experts_is_found_at_the_start() -> None:
    key = "enable_return_routed_experts"
    with serving_in_a_thread(Reporting({key: True}), Reporting({}), Reporting({key: False})) as (urls, _):
        check_reports_routes(urls[:2], "")
        with pytest.raises(ValueError) as error:
            check_reports_routes(urls, "")
        assert str(error.value) == (
            f"actor.router_replay=rollout: {urls[2]} does not report the experts of tokens; expected a server that was "
            "started with --enable-return-routed-experts"
        )


def test_a_server_whose_experts_are_not_reported_is_found_at_the_start() -> None:
    """It says what it took, also where it chose that itself."""
    reports = {"enable_return_routed_experts": True, "moe_runner_backend": "auto"}
    with serving_in_a_thread(Reporting(reports), Reporting(reports | {"moe_runner_backend": "triton_kernel"})) as (
        urls,
        _,
    ):
        check_reports_routes(urls[:1], "")
        with pytest.raises(ValueError) as error:
            check_reports_routes(urls, "")
        assert str(error.value) == (
            f"actor.router_replay=rollout: {urls[1]} computes experts with --moe-runner-backend=triton_kernel, and it "
            "does not report which experts it chooses; expected another one"
        )


def test_servers_that_do_not_tell_from_which_tokens_they_drew_are_found_at_the_start() -> None:
    """SGLang says of how many tokens it tells at most, and older versions nothing; our own has no limit."""
    key, narrow = "sampling_mask_max_tokens", load("rollout.engine=hf", "rollout.top_p=0.9", "rollout.top_k=20")
    alone = load("rollout.engine=hf", "rollout.top_p=0.9")
    given = "rollout.top_p=0.9 and rollout.top_k"
    with serving_in_a_thread(*map(Reporting, ({key: None}, {key: 40}, {key: 39}, {}))) as (urls, _):
        check_tells_support(urls[:2], "", narrow)
        check_tells_support(urls[:1], "", alone)
        for config, url, top_k, most in ((narrow, urls[2], 20, 19), (alone, urls[1], -1, 20)):
            with pytest.raises(ValueError) as error:
                check_tells_support([url], "", config)
            assert str(error.value) == (
                f"{given}={top_k}: {url} tells from which tokens it drew only for a top_k of 1 to {most}; expected "
                "one, or a larger --sampling-mask-max-tokens of the server"
            )
        with pytest.raises(ValueError) as error:
            check_tells_support([urls[0], urls[3]], "", narrow)
        assert str(error.value) == (
            f"{given}=20: {urls[3]} does not tell exactly from which tokens it drew; expected a server that does, "
            "such as SGLang 0.5.23, or 1.0 and -1"
        )


def test_a_server_that_adds_to_how_tokens_are_drawn_is_found_at_the_start() -> None:
    key = "preferred_sampling_params"
    with serving_in_a_thread(*map(Reporting, ({}, {key: None}, {key: {"min_p": 0.1}}))) as (urls, _):
        check_draws_as_asked(urls[:2], "")
        with pytest.raises(ValueError) as error:
            check_draws_as_asked(urls, "")
        assert str(error.value) == (
            f'rollout.urls: {urls[2]} was started with --preferred-sampling-params={{"min_p": 0.1}}: a server would '
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
    with serving_in_a_thread(Reporting(reports), Reporting(reports | info)) as (urls, _):
        check_reports_routes(urls[:1], "")
        with pytest.raises(ValueError, match=f"^actor.router_replay=rollout: {urls[1]} was started with {words}"):
            check_reports_routes(urls, "")
