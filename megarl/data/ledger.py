"""The ledger of a run: every visit of a prompt has a number and is settled exactly once."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from megarl.data.order import check_same_data

TRAINED, FILTERED, LOST, SKIPPED = "trained", "filtered", "lost", "skipped"
OUTCOMES = (TRAINED, FILTERED, LOST, SKIPPED)


class Ledger:
    """Which visits are handed out, and what became of them: trained, filtered (dynamic sampling), lost, or skipped.

    A visit is skipped if its numbers were bad.  At any time: handed out = open + settled in one of these ways.  What is
    open at a checkpoint is issued again by a run that resumes from it, so no visit is left out and none counts twice.

    Example: ledger = Ledger("3-ab"); ledger.issue(2) == [0, 1]; ledger.settle(1, TRAINED); ledger.open == [0]
    """

    def __init__(self, fingerprint: str) -> None:
        """`fingerprint`: of the data; a state of other data is refused."""
        self.fingerprint = fingerprint
        self.counts: Counter[str] = Counter(dict.fromkeys(OUTCOMES, 0))
        self._next = 0
        self._open: set[int] = set()
        self._again: deque[int] = deque()  # open visits to request again after a resume, oldest first
        self._left_out: set[int] = set()  # visits that are skipped when it is their turn
        self._passed: list[int] = []

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
        found: list[int] = []
        while len(found) < count:
            number = self._again.popleft() if self._again else self._new()
            if number in self._left_out:
                self._left_out.remove(number)
                self.settle(number, SKIPPED)
                self._passed.append(number)
            else:
                found.append(number)
        return found

    def _new(self) -> int:
        self._open.add(self._next)
        self._next += 1
        return self._next - 1

    def leave_out(self, numbers: Iterable[int]) -> None:
        """Settle these visits as skipped when `issue` comes to them; those that are settled already stay so."""
        self._left_out.update(number for number in numbers if number >= self._next or number in self._again)

    def passed(self) -> list[int]:
        """The visits that `issue` has skipped since the last call."""
        found, self._passed = self._passed, []
        return found

    def take_back(self, numbers: Collection[int]) -> None:
        """Visits that count as trained were skipped, as it turned out."""
        self.counts[TRAINED] -= len(numbers)
        self.counts[SKIPPED] += len(numbers)
        assert self.counts[TRAINED] >= 0, "more visits are taken back than were trained"

    def settle(self, number: int, outcome: str) -> None:
        """Write down what became of a visit."""
        assert outcome in OUTCOMES, f"outcome {outcome}: expected one of {', '.join(OUTCOMES)}"
        assert number in self._open, f"visit {number} is settled twice, or was never handed out"
        self._open.remove(number)
        self.counts[outcome] += 1

    def state_dict(self) -> dict[str, Any]:
        """{next, open, trained, filtered, lost, skipped, left_out, fingerprint}: JSON values."""
        state = {"next": self._next, "open": self.open, **self.counts, "left_out": sorted(self._left_out)}
        return state | {"fingerprint": self.fingerprint}

    def load_state_dict(self, state: Mapping[str, Any], finished: Collection[int] = ()) -> None:
        """Continue from a saved state.  `finished`: open visits whose groups were saved, which are not issued again.

        Raises ValueError if the state was saved with other data.
        """
        check_same_data(state["fingerprint"], self.fingerprint)
        self._next, self._open = int(state["next"]), {int(number) for number in state["open"]}
        self.counts = Counter({outcome: int(state[outcome]) for outcome in OUTCOMES})
        assert self._open >= set(finished), "a finished group belongs to a visit that is settled already"
        self._again = deque(sorted(self._open - set(finished)))
        self._left_out = set(state["left_out"])
