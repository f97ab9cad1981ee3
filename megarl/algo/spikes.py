"""Spikes: an optimizer step whose gradient norm or loss is far above those of the steps before it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megarl.algo.finite import BadNumber

WINDOW = 128  # optimizer steps over which mean and deviation run
WARMUP = 16  # steps before the first limit
LEAST = 0.01  # the deviation counts as at least this share of the mean


class Spike(BadNumber):
    """A gradient norm or a loss is above its limit."""


@dataclass(frozen=True)
class Limits:
    """What the numbers of a step may be at most; None: they need to be finite only."""

    grad_norm: float | None = None
    loss: float | None = None

    def allow(self, grad_norm: float, loss: float) -> bool:
        """Whether the step may be made."""
        pairs = ((grad_norm, self.grad_norm), (loss, self.loss))
        return all(math.isfinite(value) and (limit is None or value <= limit) for value, limit in pairs)


@dataclass
class Series:
    """The last values of one number, and the limit that follows from them.

    With the last n values x_1 ... x_n, n at most WINDOW:

        mean  m = (x_1 + ... + x_n) / n
        deviation  s = sqrt(((x_1 - m)^2 + ... + (x_n - m)^2) / (n - 1))
        limit  max(floor, m + sigma * max(s, LEAST * max(|m|, scale)))

    A value above the limit is a spike.  There is no limit (infinity) while n < WARMUP, or while all values are equal:
    then they say nothing about what is usual.  LEAST keeps values that hardly differ from making every change a spike.
    A spike joins the values as the limit that it passed, so that one alone moves the mean little, but a number that
    stays higher is accepted in time.

    `scale`: the size of a number that may be near 0, such as a loss; 0: the number is never near 0 unless it is small.
    `floor`: up to this value no number is a spike.
    """

    sigma: float
    scale: float = 0.0
    floor: float = -math.inf
    values: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))

    @property
    def moments(self) -> tuple[float, float]:
        """(mean, standard deviation) of at least two values."""
        n = len(self.values)
        mean = math.fsum(self.values) / n
        return mean, math.sqrt(math.fsum((x - mean) ** 2 for x in self.values) / (n - 1))

    @property
    def limit(self) -> float:
        """What the next value may be at most; infinity: there is no limit yet."""
        if len(self.values) < WARMUP or min(self.values) == max(self.values):
            return math.inf
        mean, deviation = self.moments
        return max(self.floor, mean + self.sigma * max(deviation, LEAST * max(abs(mean), self.scale)))

    def add(self, value: float) -> None:
        """Remember a value; a spike counts as the limit that it passed."""
        self.values.append(min(value, self.limit))

    def explained(self, what: str, value: float) -> str:
        """Why a value is a spike."""
        mean, deviation = self.moments
        return (
            f"{what} is {value:.4g}, a spike: over the last {len(self.values)} steps its mean is {mean:.4g} and its "
            f"standard deviation {deviation:.4g}, and trainer.spike_sigma={self.sigma:g} allows {self.limit:.4g}"
        )


class Spikes:
    """The gradient norm and the loss of one role.

    A gradient whose norm is at most `max_grad_norm` is no spike: it is not clipped, so it moves the weights as a step
    may.  Without this floor the ordinary gradients of a policy that has learnt its task are spikes, as in most of its
    steps all answers are right and the gradient is 0.

    Example: spikes = Spikes(6.0, 1.0); ...; spikes.limits == Limits(3.1, 0.4); spikes.add(0.9, 0.1)
    """

    def __init__(self, sigma: float, max_grad_norm: float) -> None:
        self._series = {"grad_norm": Series(sigma, floor=max_grad_norm), "loss": Series(sigma, scale=1.0)}

    @property
    def limits(self) -> Limits:
        """Of the next step."""
        return Limits(*(None if math.isinf(one.limit) else one.limit for one in self._series.values()))

    def add(self, grad_norm: float, loss: float) -> None:
        """Remember the numbers of a step that was made."""
        for one, value in zip(self._series.values(), (grad_norm, loss), strict=True):
            one.add(value)

    def found(self, role: str, grad_norm: float, loss: float) -> Spike:
        """The spike in a step that was not made, which is remembered as its docstring says."""
        values = {"grad_norm": (f"the gradient norm of {role}", grad_norm), "loss": (f"the loss of {role}", loss)}
        above = [
            self._series[name].explained(*said) for name, said in values.items() if said[1] > self._series[name].limit
        ]
        self.add(grad_norm, loss)
        return Spike("; ".join(above))

    def state_dict(self) -> dict[str, Any]:
        """The remembered values of each number, oldest first, for a checkpoint."""
        return {name: list(one.values) for name, one in self._series.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from the values that `state_dict` returned."""
        for name, one in self._series.items():
            one.values = deque(state[name], maxlen=WINDOW)
