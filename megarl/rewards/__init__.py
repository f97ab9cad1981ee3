"""Rewards of (prompt, completion): functions, and the processes that run them.

`functions/` has the built-in rewards, `services/` those that ask another program. `load` finds a user's function,
`result` checks what it returns, `pool` and `worker` run it in processes with a timeout for each sample, amid
`surroundings`. `scorer` joins the rewards of a run. Nothing here depends on engines or advantages.
Called by: the collector, through `scorer.Rewards`; the driver, to refuse a wrong `reward.fn` before anything starts.
"""

from collections.abc import Callable

from megarl.plugins.declared import declared
from megarl.plugins.load import FILE_MODULE
from megarl.rewards.load import SERVICES, RewardFn, resolve

# Addresses of the built-in ones, so that only the modules of rewards in use are imported.
REWARDS: dict[str, str | RewardFn] = {
    name: found.address for name, found in declared("register_reward", "rewards/functions").items()
}


def name_of(fn: str) -> str:
    """The short name of a reward, for logs and weights.  Example: "my/file.py:tidy" -> "tidy"; "gsm8k" -> "gsm8k"."""
    return fn.rpartition(":")[2]


def register_reward(name: str) -> Callable[[RewardFn], RewardFn]:
    """Add a reward under a name: f(prompt, completion) -> number or {"score": number}.

    A user's reward is in a file of algorithm.plugins, a built-in one in a file of `functions/`.

    Example:
        @register_reward("short")
        def short(prompt, completion):
            return -len(completion.token_ids) / 100
    """

    def add(function: RewardFn) -> RewardFn:
        """The decorator: add the function to the table, unless it is there already, and return it unchanged."""
        if REWARDS.get(name) == f"{function.__module__}:{function.__qualname__}":
            return function
        if function.__module__.startswith(FILE_MODULE):  # a file that reward.fn names by its path needs no name
            return function
        if name in REWARDS or name in SERVICES:
            raise ValueError(f"reward {name!r} exists already: use another name")
        REWARDS[name] = function
        return function

    return add


def load_reward(fn: str) -> RewardFn:
    """The function behind `reward.fn`: a name of REWARDS, "path/file.py:function", or "package.module:function".

    Raises ValueError of one sentence if there is no such function or it takes other arguments.
    """
    return resolve(fn, REWARDS)
