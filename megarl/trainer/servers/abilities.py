"""What the versions of a run's servers can do, and whether the run needs more."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any

from megarl.arch.projections import chosen, projections_of
from megarl.arch.sglang_options import untried
from megarl.config import Config, model_config
from megarl.config.validate.generation import PREFERRED, WHY_NOT_PREFERRED, WITHOUT_ROUTES, largest_top_k
from megarl.config.validate.lora import adapts_experts, adapts_latents
from megarl.rollout.client import ServerClient, of_all
from megarl.rollout.protocol import Abilities
from megarl.rollout.settings import GenerationSettings

ANSWER_S = 30.0  # in which a server that serves answers; it only looks up what it was started with

ServerInfoByUrl = Mapping[str, Mapping[str, Any]]  # url -> what a server says of itself


def ask_servers(urls: Sequence[str], token: str, limit_s: float = ANSWER_S) -> tuple[ServerInfoByUrl, dict[str, str]]:
    """The /server_info of all servers, requested at once; and url -> why there is no answer."""

    def ask(url: str) -> dict[str, Any]:
        with closing(ServerClient(url, token, timeout_s=limit_s)) as server:
            return server.server_info()

    servers, failed = of_all(urls, ask)
    return servers, {url: str(error) for url, error in failed.items()}


def fitting(servers: ServerInfoByUrl, config: Config, *, drains: bool) -> list[Abilities]:
    """What the servers can do.  Raises ValueError if one of them does not fit the run."""
    abilities = [Abilities.of(str(info.get("version", ""))) for info in servers.values()]
    check_abilities(abilities, config, drains=drains)
    check_tried(servers)
    check_draws_as_asked(servers)
    check_drafts(servers, wanted=config.drafts)
    if config.actor.router_replay == "rollout":
        check_reports_routes(servers, has_indexers=bool(model_config(config, "actor").get("index_topk")))
    if config.narrows_sampling:
        check_tells_support(servers, config)
    return abilities


def dp_ranks_of(servers: ServerInfoByUrl) -> int:
    """The data-parallel ranks of each server, attention groups or replicas; 1, if servers differ: they choose then."""
    found = {int(info.get("dp_size") or 1) * int(info.get("attn_dp_size") or 1) for info in servers.values()}
    return found.pop() if len(found) == 1 else 1


def check_newcomer(url: str, config: Config, token: str, *, drains: bool, generation: GenerationSettings) -> None:
    """Raises ValueError for a server that joins, or comes back with other options, and does not fit the run."""
    servers, silent = ask_servers([url], token)
    if silent:
        raise ValueError(silent[url])
    (ability,) = fitting(servers, config, drains=drains)
    if generation.salted and not ability.cache_salt:
        raise ValueError(f"{url} knows no salts of its prefix cache, unlike the run's servers")
    dp_ranks, wanted = dp_ranks_of(servers), generation.dp_ranks
    if wanted not in (1, dp_ranks):  # a request may name any of them
        raise ValueError(f"{url} has {dp_ranks} data-parallel ranks: expected {wanted}, as the run's servers")


def check_abilities(abilities: Sequence[Abilities], config: Config, *, drains: bool) -> None:
    """Raises ValueError if a server lacks a feature that the run needs.

    With rollout.ahead > 0 a push that does not drain may come in the middle of a completion.
    """
    rollout, lora = config.rollout, config.actor.lora
    if rollout.ahead and not drains and not all(ability.version_spans for ability in abilities):
        raise ValueError(
            f"rollout.ahead={rollout.ahead}: this SGLang reports only one version for each completion; expected 0, "
            "rollout.update=drain, or SGLang 0.5.20 and newer"
        )
    if rollout.quantization == "fp8" and not all(ability.rereads_fp8 for ability in abilities):
        raise ValueError(
            "rollout.quantization=fp8: this SGLang cannot read a folder again, to compare it; expected none, or "
            "SGLang 0.5.23 and newer"
        )
    if lora.rank and lora.push == "adapter" and not all(ability.frees_adapters for ability in abilities):
        raise ValueError(
            "actor.lora.push=adapter: this SGLang may hang when an adapter is unloaded; expected merged, or "
            "SGLang 0.5.22 and newer"
        )
    if lora.rank and lora.push == "adapter" and not all(ability.adapts_experts for ability in abilities):
        hf = model_config(config, "actor")
        targets = set(chosen(lora.targets, projections_of(hf)))
        if adapts_experts(hf, targets) or adapts_latents(targets):
            raise ValueError(
                "actor.lora.push=adapter: this SGLang serves no adapters of experts or of latent attention; expected "
                "merged, or SGLang 0.5.23 and newer"
            )


def check_tells_support(servers: ServerInfoByUrl, config: Config) -> None:
    """Raises ValueError for a server that does not report exactly from which tokens it drew.

    A server that does reports a limit on their number; null: no limit.  SGLang 0.5.17 does not: it rebuilds this set
    after the draw, and at the border that need not be what its kernel kept.
    """
    rollout = config.rollout
    given = f"rollout.top_p={rollout.top_p} and rollout.top_k={rollout.top_k}"
    for url, info in servers.items():
        limit = info.get("sampling_mask_max_tokens", "")
        if limit is not None and type(limit) is not int:
            raise ValueError(
                f"{given}: {url} does not report exactly from which tokens it drew; expected a server that does, such "
                "as SGLang 0.5.23, or 1.0 and -1"
            )
        most = None if limit is None else largest_top_k(limit)
        if most is not None and not 1 <= rollout.top_k <= most:
            raise ValueError(
                f"{given}: {url} reports from which tokens it drew only for a top_k of 1 to {most}; expected one, or a "
                "larger --sampling-mask-max-tokens of the server"
            )


def check_draws_as_asked(servers: ServerInfoByUrl) -> None:
    """Raises ValueError for a server that adds something to how a request wants its tokens drawn."""
    field = PREFERRED.removeprefix("--").replace("-", "_")
    for url, info in servers.items():
        if preferred := info.get(field):
            raise ValueError(
                f"rollout.urls: {url} was started with {PREFERRED}={json.dumps(preferred)}: {WHY_NOT_PREFERRED}; "
                "expected one without it"
            )


def check_tried(servers: ServerInfoByUrl) -> None:
    """Raises ValueError for a server with an option with which pushes were not tried.

    It may come from who started the server, or from SGLang, which chooses some of them by the GPU and the model.
    """
    for url, info in servers.items():
        for given, option in untried(info):
            raise ValueError(f"{url} runs with {given}: {option.why}; expected {option.expected}")
        if info.get("quantization") is not None and info.get("load_format") != "flash_rl":
            raise ValueError(
                f"{url} holds weights in {info['quantization']}, and would quantize the first ones only; "
                "expected a server that `megarl serve` started, with rollout.quantization"
            )


def check_drafts(servers: ServerInfoByUrl, *, wanted: bool) -> None:
    """Raises ValueError for a server with a draft model that no push reaches, or without one that pushes would reach.

    `wanted`: pushes bring the policy's MTP layers too.
    """
    for url, info in servers.items():
        if (found := info.get("speculative_algorithm") is not None) != wanted:
            told = "rollout.sglang.args=--speculative-algorithm and actor.mtp"
            raise ValueError(f"{url} {'drafts' if found else 'does not draft'}, unlike {told} say; expected the same")


def check_reports_routes(servers: ServerInfoByUrl, *, has_indexers: bool = False) -> None:
    """Raises ValueError for a server that runs already and does not report the experts of tokens, or loses them.

    `has_indexers`: of the model; then it must report the keys that they choose too.
    """
    for url, info in servers.items():
        if info.get("enable_return_routed_experts") is False:
            raise ValueError(
                f"actor.router_replay=rollout: {url} does not report the experts of tokens; expected a server that "
                "was started with --enable-return-routed-experts"
            )
        if info.get("enable_return_indexer_topk") is False and has_indexers:
            raise ValueError(
                f"actor.router_replay=rollout: {url} does not report the keys that indexers choose; expected a server "
                "that was started with --enable-return-indexer-topk and SGLANG_DSA_FUSE_TOPK=0"
            )
        for option, why in WITHOUT_ROUTES.items():
            if info.get(option.removeprefix("--").replace("-", "_")):
                raise ValueError(
                    f"actor.router_replay=rollout: {url} was started with {option}: {why}; expected one without it"
                )
