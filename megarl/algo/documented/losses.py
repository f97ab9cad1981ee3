"""Adapter for policy losses in verl's documented form, on [batch, sequence] tensors.

A policy loss (old_log_probs, log_probs, advantages, response_mask, loss_agg_mode, config, rollout_log_probs) returns an
aggregated scalar.  On a micro-batch its denominators would be those of the micro-batch, and its gradient would change
with every split.  On ONE sequence no split can change it.  So the function is called once for each sequence, with its
trainable tokens only, and every token of sequence b gets the scalar F_b:

    sum_t weight_t F_b(t) = sum_b scale_b n_b F_b      (each mode's weight is one number per sequence)

For token-mean this is sum_b n_b F_b / sum_b n_b, and for seq-mean-token-mean the mean of F_b over the whole step.  The
function itself returns the same for the whole step at once, if it is a mean over tokens, or over sequences, of terms
that do not depend on other sequences.  This condition is tested numerically, value and gradient, before the run starts.

    tokens      F(a, b) = (n_a F(a) + n_b F(b)) / (n_a + n_b)
    sequences   F(a, b) = (F(a) + F(b)) / 2

A function that averages over tokens for loss_agg_mode="token_level" and over sequences for "sample_level" runs with
every actor.loss_agg_mode; one that does the same for both runs only with that mode; any other is refused.

verl's source has other names than its documentation: old_log_prob, log_prob, the modes token-mean and
seq-mean-token-mean, a `config` with the clips, and rollout_is_weights, which is None: the weight of rollout correction
multiplies what the function returns for a sequence.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megarl.algo.documented.configs import ActorConfig
from megarl.algo.documented.signatures import (
    LONG_PROBE_LENGTHS,
    PROBE_LENGTHS,
    Config,
    RefusedError,
    accepted,
    adapted_signature,
    in_one_sentence,
    is_of_source,
)

LOSS_COLUMNS = ("old_log_probs", "log_probs", "advantages", "response_mask")
LOSS_FORM = (*LOSS_COLUMNS, "loss_agg_mode", "config", "rollout_log_probs")
MODES = {"token_level": "tokens", "sample_level": "sequences"}  # the documented modes, and what each averages over
SOURCE_NAMES = {"old_log_prob": "old_log_probs", "log_prob": "log_probs"}  # of verl's source -> the documented ones
SOURCE_FORM = (*SOURCE_NAMES, "advantages", "response_mask", "loss_agg_mode", "config", "rollout_is_weights")
SOURCE_MODES = {"token-mean": "tokens", "seq-mean-token-mean": "sequences"}
CLIPS = {"clip_low": "clip_ratio_low", "clip_high": "clip_ratio_high", "clip_c": "clip_ratio_c"}
# What `config` has in verl besides the arguments of a loss; the sizes of a batch are those of one sequence.
SOURCE_CONFIG: dict[str, Any] = {
    **{"clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 3.0},
    **{"tau_pos": 1.0, "tau_neg": 1.05, "global_batch_info": {}, "loss_scale_factor": None},
}
# What `config.policy_loss` has besides: the defaults of verl's losses by covariance.
SOURCE_POLICY_LOSS: dict[str, Any] = {
    **{"clip_cov_ratio": 0.0002, "clip_cov_lb": 1.0, "clip_cov_ub": 5.0, "kl_cov_ratio": 0.0002, "ppo_kl_coef": 0.1},
}
AGG_MODES_OF = {"tokens": ("token-mean", "token_level"), "sequences": ("seq-mean-token-mean", "sample_level")}


class DocumentedLoss:
    """A documented policy loss in the form of this layer: every token gets its sequence's scalar.

    `config` holds algorithm.policy_loss_args as attributes, or is None if there are none.  The function's diagnostics
    are logged as actor/NAME/..., as means with the weights of the loss; a value that is not finite, such as the
    standard deviation of a single token, counts as 0.  The weight of rollout correction must be one number per
    sequence.
    """

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.name, self._function = name, function
        self._is_of_source = is_of_source(function)
        self._modes = SOURCE_MODES if self._is_of_source else MODES
        form = SOURCE_FORM if self._is_of_source else LOSS_FORM
        self._takes = accepted(f"policy loss {name!r}", function, form)
        reads_clips = self._is_of_source and "config" in self._takes
        self.agg_modes: tuple[str, ...] | None = None  # None: all modes; set by `rehearse`
        self.__signature__ = adapted_signature(
            ("log_probs", "old_log_probs", "advantages", "mask", "segment_ids"),
            ({"rollout_log_probs": inspect.Parameter.empty} if "rollout_log_probs" in self._takes else {})
            | (dict.fromkeys(CLIPS) if reads_clips else {}),
            any_keyword="config" in self._takes,
        )

    def __call__(
        self,
        log_probs: Tensor,
        old_log_probs: Tensor,
        advantages: Tensor,
        mask: Tensor,
        segment_ids: Tensor,
        *,
        rollout_log_probs: Tensor | None = None,
        **args: Any,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Token loss [T], F_b on every trainable token; the diagnostics in the same form."""
        live = mask.nonzero().squeeze(1)
        lengths = segment_ids[live].unique_consecutive(return_counts=True)[1]
        columns = {"old_log_probs": old_log_probs, "log_probs": log_probs, "advantages": advantages}
        if rollout_log_probs is not None:
            columns["rollout_log_probs"] = rollout_log_probs
        parts = {name: column[live].split(lengths.tolist()) for name, column in columns.items()}
        config, mode = self._config(args), next(iter(self._modes))
        found = [
            self._evaluate({name: part[b].unsqueeze(0) for name, part in parts.items()}, mode, config)
            for b in range(len(lengths))
        ]

        def spread(numbers: Sequence[Tensor]) -> Tensor:
            """One number per sequence -> [T], on its trainable tokens."""
            per_token = torch.stack(list(numbers)).to(log_probs).repeat_interleave(lengths)
            return torch.zeros_like(log_probs).index_put((live,), per_token)

        if not found:
            return 0.0 * log_probs, {}
        names = dict.fromkeys(name for _, info in found for name in info)
        stats = {f"{self.name}/{n}": spread([torch.tensor(info.get(n, 0.0)) for _, info in found]) for n in names}
        return spread([scalar for scalar, _ in found]), stats

    def _config(self, args: Mapping[str, Any]) -> Config | None:
        """What the function gets as `config`: None for a documented one without arguments."""
        if not self._is_of_source:
            return ActorConfig(args) if args else None
        named = {CLIPS.get(name, name): value for name, value in args.items()}
        policy_loss = Config(named, SOURCE_CONFIG | SOURCE_POLICY_LOSS)
        return ActorConfig(named | {"policy_loss": policy_loss}, SOURCE_CONFIG)

    def rehearse(self, args: Mapping[str, Any]) -> None:
        """Test whether the function gives the same result under any split, and with which modes.

        Raises: ValueError with the reason if it does not.
        """
        config = self._config(args)
        kinds = {mode: self._averages_over(mode, config) for mode in self._modes}
        self.agg_modes = None if kinds == self._modes else _common(kinds.values())
        if kinds != self._modes and self.agg_modes is None:
            tokens, sequences = self._modes
            raise ValueError(
                f"policy loss {self.name}: it averages over {kinds[tokens]} for loss_agg_mode={tokens!r} and over "
                f"{kinds[sequences]} for {sequences!r}, expected it the other way round"
            )
        read = set(config.read) if config else set()
        read |= config.policy_loss.read if config and self._is_of_source else set()
        for name in sorted(args):
            if config and CLIPS.get(name, name) not in read:
                key = f"actor.{CLIPS[name]}" if name in CLIPS else f"algorithm.policy_loss_args.{name}"
                raise ValueError(
                    f"{key}={args[name]}: the policy loss {self.name} does not read config.{CLIPS.get(name, name)}, "
                    "leave it out"
                )

    def _averages_over(self, mode: str, config: Config | None) -> str:
        """ "tokens" or "sequences": what the function averages over, on short and on long sequences."""
        kinds = ["tokens", "sequences"]
        for pair in (PROBE_LENGTHS, LONG_PROBE_LENGTHS):
            kinds = [kind for kind in self._kinds_on(pair, mode, config) if kind in kinds]
            if not kinds:
                raise ValueError(
                    f"policy loss {self.name}: for loss_agg_mode={mode!r} its value or gradient on two sequences, of "
                    f"{pair[0]} and {pair[1]} tokens, is neither the mean over tokens nor the mean over sequences of "
                    "those on each alone (it mixes sequences, counts masked tokens, bounds its denominator, or sums), "
                    "so it would change with the micro-batch; expected each sequence's loss to depend on that sequence "
                    "only, averaged as loss_agg_mode says, whatever the lengths"
                )
        return kinds[0]

    def _kinds_on(self, pair: tuple[int, int], mode: str, config: Config | None) -> list[str]:
        """What it averages over, by value and gradient on two sequences together and on each alone."""
        together = self._probe(pair, (0, 1), mode, config)
        alone = [self._probe(pair, (b,), mode, config) for b in (0, 1)]
        shares = {"tokens": [n / sum(pair) for n in pair], "sequences": [0.5, 0.5]}
        return [
            kind
            for kind, (a, b) in shares.items()
            if torch.allclose(together, a * alone[0] + b * alone[1], rtol=1e-6, atol=1e-9)
        ]

    def _probe(self, pair: tuple[int, int], rows: Sequence[int], mode: str, config: Config | None) -> Tensor:
        """[1 + sum(pair)]: the scalar, and its gradient, on these rows of a fixed random batch, padded on the right."""
        names = ("old_log_probs", "log_probs", "advantages", "rollout_log_probs")
        g = torch.Generator().manual_seed(0)
        noise = {name: torch.randn(sum(pair), generator=g, dtype=torch.float64) for name in names}
        # Advantages so large that a loss that chooses tokens by their covariance with log_probs finds some.
        flat = {"old_log_probs": -1.5 - 0.3 * noise["old_log_probs"], "advantages": 3.0 * noise["advantages"]}
        flat["log_probs"] = (flat["old_log_probs"] + 0.3 * noise["log_probs"]).requires_grad_()
        flat["rollout_log_probs"] = flat["old_log_probs"] + 0.05 * noise["rollout_log_probs"]
        lengths = [pair[b] for b in rows]
        width = max(lengths)

        def padded(column: Tensor) -> Tensor:
            """[T] -> [batch, width], zeros after each sequence."""
            parts = column.split(pair)
            return torch.stack([torch.nn.functional.pad(parts[b], (0, width - len(parts[b]))) for b in rows])

        mask = padded(torch.ones_like(flat["advantages"]))
        taken = {SOURCE_NAMES.get(name, name) for name in self._takes}
        columns = {name: padded(column) for name, column in flat.items() if name in taken}
        what = f"policy loss {self.name}: on sequences of {' and '.join(map(str, lengths))} tokens it"
        hint = " (config holds algorithm.policy_loss_args, and is None without any)"
        with in_one_sentence(what, self._function, hint):
            scalar, _ = self._evaluate(columns, mode, config, mask)
        if not scalar.requires_grad:
            raise ValueError(
                f"policy loss {self.name}: its scalar does not depend on log_probs, expected one that does"
            )
        (gradient,) = torch.autograd.grad(scalar, flat["log_probs"])
        return torch.cat([scalar.detach().reshape(1), gradient])

    def _evaluate(
        self, columns: Mapping[str, Tensor], mode: str, config: Config | None, mask: Tensor | None = None
    ) -> tuple[Tensor, dict[str, float]]:
        log_probs = columns["log_probs"]
        offered = {
            **columns,
            "response_mask": torch.ones_like(log_probs, requires_grad=False) if mask is None else mask,
            "loss_agg_mode": mode,
            "config": config,
            "rollout_is_weights": None,
        }
        offered |= {theirs: offered[ours] for theirs, ours in SOURCE_NAMES.items()}
        found = self._function(**{name: value for name, value in offered.items() if name in self._takes})
        if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], Mapping)):
            raise RefusedError(f"policy loss {self.name}: expected it to return (scalar tensor, {{name: number}})")
        scalar, info = found
        if not (isinstance(scalar, Tensor) and scalar.shape == ()):
            shape = f"shape {tuple(scalar.shape)}" if isinstance(scalar, Tensor) else type(scalar).__name__
            raise RefusedError(f"policy loss {self.name}: it returns {shape}, expected a scalar tensor in this form")
        return scalar, {name.removeprefix("actor/"): _number(self.name, name, value) for name, value in info.items()}


def _common(kinds: Iterable[str]) -> tuple[str, ...] | None:
    """The modes of this layer for the common kind; None if the kinds differ."""
    different = set(kinds)
    return AGG_MODES_OF[different.pop()] if len(different) == 1 else None


def _number(loss: str, name: str, value: Any) -> float:
    """A diagnostic as a plain number; 0 if it is not finite."""
    try:
        number = float(value.detach() if isinstance(value, Tensor) else value)
    except (TypeError, ValueError, RuntimeError):
        kind = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise RefusedError(f"policy loss {loss}: its diagnostic {name!r} is {kind}, expected one number") from None
    return number if math.isfinite(number) else 0.0
