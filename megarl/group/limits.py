"""The time limit of a call, from how long calls of its kind took before."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class CallLimits:
    """Example: limits = CallLimits(600.0, factor=5.0, floor_s=120.0); limits.of("update actor", 10**6) -> 600.0

    The first call of a kind may take `longest_s`; a later one `factor` times as long as the longest so far, at least
    `floor_s` and never more than `longest_s`.  A call with more than twice the data of all before it counts as a first.
    Methods in `outside` wait for others than ranks, so that earlier calls say little: each may take `longest_s`.
    """

    longest_s: float
    factor: float | None = None  # None: every call may take `longest_s`
    floor_s: float = 0.0
    outside: tuple[str, ...] = ()
    _seen: dict[str, tuple[float, int]] = field(default_factory=dict)  # kind -> most seconds, most bytes

    def of(self, kind: str, num_bytes: int) -> float:
        """Seconds that a call of this kind, a method and perhaps a role, may take."""
        seconds, most = self._seen.get(kind, (0.0, -1))
        waits_outside = kind.partition(" ")[0] in self.outside
        if self.factor is None or waits_outside or most < 0 or num_bytes > 2 * most:
            return self.longest_s
        return min(self.longest_s, max(self.floor_s, self.factor * seconds))

    def took(self, kind: str, num_bytes: int, seconds: float) -> None:
        """Remember a call that has succeeded."""
        before, most = self._seen.get(kind, (0.0, -1))
        self._seen[kind] = max(before, seconds), max(most, num_bytes)
