"""The endless order in which rows are used, epoch after epoch: visit 0, 1, 2, ... each is one use of one row."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from megarl.data.readers import content_digest


class Visits:
    """Epoch after epoch over `num_rows` rows; epoch e is a permutation that depends only on (seed, e).

    A visit is a number, so that a position, or a set of visits, is saved as plain numbers.
    Example: order = Visits(3, shuffle=False, seed=0); [order.at(n) for n in range(4)] is
    [(0, 0), (0, 1), (0, 2), (1, 0)].
    """

    def __init__(self, num_rows: int, *, shuffle: bool, seed: int) -> None:
        assert num_rows > 0, "an order needs at least one row"
        self.num_rows = num_rows
        self._shuffle, self._seed = shuffle, seed
        self._order = lru_cache(maxsize=2)(self._order_of)  # of two epochs: visits near a border need both

    def at(self, number: int) -> tuple[int, int]:
        """Visit `number` as (epoch, row)."""
        epoch, place = divmod(number, self.num_rows)
        return epoch, int(self._order(epoch)[place])

    def _order_of(self, epoch: int) -> np.ndarray:
        """[num_rows] the rows in the order of this epoch."""
        if not self._shuffle:
            return np.arange(self.num_rows)
        return np.random.default_rng([self._seed, epoch]).permutation(self.num_rows)


def fingerprint_of(files: str | Sequence[str], rows: Sequence[int], *, shuffle: bool, seed: int) -> str:
    """All that decides which row a visit is: the content of the files, the rows that are used, and their order."""
    used = hashlib.blake2b(np.asarray(rows, dtype=np.int64).tobytes(), digest_size=4).hexdigest()
    return f"{len(rows)}-{content_digest(files)}-{used}-{f'seed{seed}' if shuffle else 'unshuffled'}"


def check_same_data(saved: str, here: str) -> None:
    """Raises ValueError if a saved position belongs to other data: two fingerprints (rows, content, order) differ."""
    if saved != here:
        raise ValueError(
            f"the saved data position belongs to other data (rows, content and order {saved}, here {here}); "
            "expected the same files, length limits, shuffle and seed, or a run without resuming"
        )
