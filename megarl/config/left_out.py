"""The keys of words that could not be taken.

`megarl train` tells everything in one go.  So the other checks go on without these words, with what is below them, and
a sentence that may only be there because a word was left out is not told.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase

from megarl.config.aliases import canonical
from megarl.config.keys import type_of
from megarl.config.resolve import sources_of

_NAME = re.compile(r"[A-Za-z_]\w*(?:\.[\w-]+)+")
_LAYOUT = "*.megatron.*parallel* *.megatron.num_layers_* *.num_ranks *.first_rank *ppo_micro_* *log_prob_micro_*"
_RANKS = "trainer.nnodes trainer.n_gpus_per_node *.num_ranks *.first_rank *.megatron.*parallel_size"
_MODEL = "model.path model.config *.model.path *.model.config"

# Sentences about the keys on the left may be caused by the keys on the right without naming them.
_CAUSES = (
    ("critic.*", "algorithm.adv_estimator"),
    ("ref.*", "actor.use_kl_loss algorithm.use_kl_in_reward reward.fn"),
    ("distill.*", "teachers.*"),
    ("agent.*", "agent.fn agent.command"),
    (_LAYOUT, f"{_RANKS} {_MODEL}"),
    ("data.train_batch_size *.ppo_mini_batch_size", f"{_RANKS} rollout.n"),
    ("rollout.num_servers rollout.first_gpu rollout.*parallel_size rollout.placement", f"{_RANKS} {_MODEL}"),
)


@dataclass(frozen=True)
class LeftOut:
    """Example: LeftOut(frozenset({"rollout.n"})).may_cause("rollout.n=1: expected at least 2") is True."""

    keys: frozenset[str] = frozenset()

    def may_cause(self, sentence: str) -> bool:
        """Is this sentence about one of these keys, or about one that follows from them?"""
        return bool(self.keys) and any(self.has(key) or self._decides(key) for key in keys_in(sentence))

    def has(self, *patterns: str) -> bool:
        """Is one of these keys left out, or a part of one?  Example: has("data.*", "model.path")."""
        return any(_overlap(key, pattern) for key in self.keys for pattern in patterns)

    def _decides(self, key: str) -> bool:
        if any(source in self.keys for source in sources_of(key)):
            return True
        return any(self.has(*causes.split()) for about, causes in _CAUSES if _is_one_of(key, about))


def keys_in(text: str) -> set[str]:
    """Our names of the keys in a text; what only looks like a key, such as the name of a file, is left out."""
    found = [canonical(name) for name in _NAME.findall(text)]
    return {name.key for name in found if not isinstance(name, str) and _is_key(name.key)}


def _overlap(key: str, pattern: str) -> bool:
    """Is it the same key, or is one an entry of the other?"""
    return fnmatchcase(key, pattern) or key.startswith(f"{pattern}.") or pattern.startswith(f"{key}.")


def _is_one_of(key: str, patterns: str) -> bool:
    return any(fnmatchcase(key, pattern) for pattern in patterns.split())


def _is_key(name: str) -> bool:
    """Is it a key, or an entry of one, as model.config.hidden_size?"""
    parts = name.split(".")
    return any(type_of(".".join(parts[:end])) is not None for end in range(2, len(parts) + 1))
