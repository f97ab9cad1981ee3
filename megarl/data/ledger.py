"""The ledger of a run: every visit of a prompt has a number and is settled exactly once."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Mapping
from typing import Any

from megarl.data.order import check_same_data

TRAINED, FILTERED, LOST = "trained", "filtered", "lost"
OUTCOMES = (TRAINED, FILTERED, LOST)


class Ledger:
    """Which visits are handed out, and what became of them: trained, filtered (dynamic sampling), or lost.

    At any time: handed out = open + trained + filtered + lost.  What is open at a checkpoint is issued again by a run
    that resumes from it, so no visit is skipped and none counts twice.

    Example: ledger = Ledger("3-ab"); ledger.issue(2) == [0, 1]; ledger.settle(1, TRAINED); ledger.open == [0]
    """

    def __init__(self, fingerprint: str) -> None:
        """`fingerprint`: of the data; a state of other data is refused."""
        self.fingerprint = fingerprint
        self.counts: Counter[str] = Counter(dict.fromkeys(OUTCOMES, 0))
        self._next = 0
        self._open: set[int] = set()
        self._again: deque[int] = deque()  # open visits that nobody works on since a resume, oldest first

    @property
    def open(self) -> list[int]:
        """Visits that are handed out and not settled, oldest first."""
        return sorted(self._open)

    @property
    def num_settled(self) -> int:
        return self.counts.total()

    @property
    def num_again(self) -> int:
        """Visits that a resumed run left open and that are not issued again yet."""
        return len(self._again)

    def issue(self, count: int) -> list[int]:
        """Hand out `count` visits: first those that a resumed run left open, then new ones."""
        again = [self._again.popleft() for _ in range(min(count, len(self._again)))]
        new = range(self._next, self._next + count - len(again))
        self._next = new.stop
        self._open.update(new)
        return [*again, *new]

    def settle(self, number: int, outcome: str) -> None:
        """Write down what became of a visit."""
        assert outcome in OUTCOMES, f"outcome {outcome}: expected one of {', '.join(OUTCOMES)}"
        assert number in self._open, f"visit {number} is settled twice, or was never handed out"
        self._open.remove(number)
        self.counts[outcome] += 1

    def state_dict(self) -> dict[str, Any]:
        """{next, open, trained, filtered, lost, fingerprint}: JSON values."""
        return {"next": self._next, "open": self.open, **self.counts, "fingerprint": self.fingerprint}

    def load_state_dict(self, state: Mapping[str, Any], finished: Collection[int] = ()) -> None:
        """Continue from a saved state.  `finished`: open visits whose groups were saved, which are not issued again.

        Raises ValueError if the state was saved with other data.
        """
        check_same_data(state["fingerprint"], self.fingerprint)
        self._next, self._open = int(state["next"]), {int(number) for number in state["open"]}
        self.counts = Counter({outcome: int(state[outcome]) for outcome in OUTCOMES})
        assert self._open >= set(finished), "a finished group belongs to a visit that is settled already"
        self._again = deque(sorted(self._open - set(finished)))
