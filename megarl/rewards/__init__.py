"""How good a completion is: a number for (prompt, completion), and the processes that compute it.

Knows: the built-in rewards (functions with `@register_reward` in this folder), how a user's function is found (`load`),
what may be returned (`result`), and the pool that runs it with a limit for each sample (`worker`, `pool`).
Does not know: engines, tokenizers, how a reward becomes an advantage.
Called by: the collector, through `pool.RewardPool`; the driver, to refuse a wrong `reward.fn` before anything starts.
"""

from collections.abc import Callable

from megarl.declared import declared
from megarl.rewards.load import RewardFn, resolve

# Addresses of the built-in ones: nobody loads the mathematics of a reward that he does not use.
REWARDS: dict[str, str | RewardFn] = {
    name: found.address for name, found in declared("register_reward", "rewards").items()
}


def register_reward(name: str) -> Callable[[RewardFn], RewardFn]:
    """Add a reward under a name: f(prompt, completion) -> number or {"score": number}.

    A user's stands in a file of algorithm.plugins, a built-in in a file of this folder.

    Example:
        @register_reward("short")
        def short(prompt, completion):
            return -len(completion.token_ids) / 100
    """

    def add(function: RewardFn) -> RewardFn:
        """The decorator: put the function into the table, unless it is the one there, and leave it as it is."""
        if REWARDS.get(name) == f"{function.__module__}:{function.__qualname__}":
            return function
        if name in REWARDS:
            raise ValueError(f"reward {name!r} exists already: use another name")
        REWARDS[name] = function
        return function

    return add


def load_reward(fn: str) -> RewardFn:
    """The function behind `reward.fn`: a name of REWARDS, "path/file.py:function", or "package.module:function".

    Raises ValueError of one sentence when there is no such function or it takes other arguments.
    """
    return resolve(fn, REWARDS)
