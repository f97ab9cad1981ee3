"""Metrics of a step from what the rollout has counted: tokens and servers (`Usage`), lengths (`Lengths`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from megarl.samples.sample import OF_AGENTS, Sample

WASTED = "wasted_"  # counters: tokens that are in no finished group, by cause


class Usage:
    """Turns the totals that collectors count into the metrics of a step.

    Example: usage = Usage(collectors.counters); ...; metrics |= usage.of_step(collectors.counters)

    What the counters say at its creation, for example the time of the start-up, is in no step.
    """

    def __init__(self, counters: Mapping[str, float]) -> None:
        self._before = dict(counters)

    def of_step(self, counters: Mapping[str, float]) -> dict[str, float]:
        """Metrics of the time since the last call; see EnginePool.counters and Collectors.counters for the names.

        Returns: servers_idle_share: of the servers' time without a request.  tokens_wasted_share, and for each cause
            tokens_wasted_share/CAUSE: of the tokens that servers generated.  stale_prefix: replies with KV of other
            weights.  failed_requests: sent again.  collector_restarts, slow_servers: in total.  agent/*: what happened
            to episodes.
        """
        new = {name: value - self._before.get(name, 0.0) for name, value in counters.items()}
        self._before = dict(counters)
        wasted = {name.removeprefix(WASTED): value for name, value in new.items() if name.startswith(WASTED)}
        tokens = max(new.get("tokens", 0.0), sum(wasted.values()), 1.0)
        out = {f"tokens_wasted_share/{cause}": value / tokens for cause, value in wasted.items() if value}
        out["tokens_wasted_share"] = sum(wasted.values()) / tokens
        if (servers_s := new.get("servers_s", 0.0)) > 0:
            out["servers_idle_share"] = min(1.0, max(0.0, 1 - new["busy_s"] / servers_s))
        out["stale_prefix"] = new.get("stale_prefixes", 0.0)
        out["failed_requests"] = new.get("failed_requests", 0.0)
        out["collector_restarts"] = counters.get("restarts", 0.0)
        out["slow_servers"] = counters.get("slow_servers", 0.0)
        return out | {name: value for name, value in new.items() if name.startswith(OF_AGENTS)}


class Lengths:
    """How long completions are: those that came since the start, and those of them that were trained."""

    def __init__(self) -> None:
        self._tokens: Counter[str] = Counter()
        self._completions: Counter[str] = Counter()

    def add(self, what: str, group: Sequence[Sample]) -> None:
        """`what`: "generated" or "trained"."""
        self._tokens[what] += sum(sample.num_learnt for sample in group)
        self._completions[what] += len(group)

    def metrics(self) -> dict[str, float]:
        """length_trained_over_generated, the ratio of the mean lengths; {} before something was trained."""
        if not (self._completions["generated"] and self._completions["trained"]):
            return {}
        trained, generated = (self._tokens[what] / self._completions[what] for what in ("trained", "generated"))
        return {"length_trained_over_generated": trained / generated if generated else 1.0}
