"""The endless order in which rows are used, epoch after epoch, with a position that can be saved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np


class Visits:
    """Epoch after epoch over `num_rows` rows; epoch e is a permutation that depends only on (seed, e).

    A position is three plain values, so that a resumed run continues without replaying the order.
    Example: Visits(3, shuffle=False, seed=0, fingerprint="3-ab").next(4) == [(0, 0), (0, 1), (0, 2), (1, 0)].
    """

    def __init__(self, num_rows: int, *, shuffle: bool, seed: int, fingerprint: str) -> None:
        assert num_rows > 0, "an order needs at least one row"
        self.num_rows = num_rows
        self.fingerprint = fingerprint
        self._shuffle = shuffle
        self._seed = seed
        self._epoch = 0
        self._position = 0
        self._order = self._order_of(0)

    def next(self, count: int) -> list[tuple[int, int]]:
        """The next `count` visits as (epoch, row)."""
        visits: list[tuple[int, int]] = []
        while len(visits) < count:
            if self._position == self.num_rows:
                self._go_to(self._epoch + 1, 0)
            stop = min(self.num_rows, self._position + count - len(visits))
            visits.extend((self._epoch, int(row)) for row in self._order[self._position : stop])
            self._position = stop
        return visits

    def state_dict(self) -> dict[str, Any]:
        """{epoch, position, fingerprint}: JSON values."""
        return {"epoch": self._epoch, "position": self._position, "fingerprint": self.fingerprint}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position.  Raises ValueError if it was saved with other data."""
        if state["fingerprint"] != self.fingerprint:
            raise ValueError(
                f"the saved data position belongs to other data (rows and content {state['fingerprint']}, "
                f"here {self.fingerprint}); expected the same files and length limits, or a run without resuming"
            )
        self._go_to(int(state["epoch"]), int(state["position"]))

    def _go_to(self, epoch: int, position: int) -> None:
        self._epoch, self._position = epoch, position
        self._order = self._order_of(epoch)

    def _order_of(self, epoch: int) -> np.ndarray:
        """[num_rows] the rows in the order of this epoch."""
        if not self._shuffle:
            return np.arange(self.num_rows)
        return np.random.default_rng([self._seed, epoch]).permutation(self.num_rows)
