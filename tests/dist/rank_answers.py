"""What ranks answer to many cases that run together: starting ranks and building models costs more than most cases."""

from collections.abc import Callable, Collection
from typing import Any


class Answers(dict[Any, list[Any]]):
    """Case -> what each rank returned of it.  A group of cases runs when one of them is first asked for.

    Example: Answers((cases, lambda: ranks.run(run_cases, cases)))
    """

    def __init__(self, *groups: tuple[Collection[Any], Callable[[], list[Any]]]) -> None:
        super().__init__()
        self._groups = groups

    def __missing__(self, wanted: Any) -> list[Any]:
        cases, run = next(group for group in self._groups if wanted in group[0])
        ranks = run()
        self.update({case: [rank[case] for rank in ranks] for case in cases})
        return dict.__getitem__(self, wanted)
