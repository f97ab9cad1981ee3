"""Makes one ragged Batch from scored groups, and splits a Batch into the mini-batches of its optimizer steps."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from megarl.sample import REWARD_ERROR, Batch, Sample

# Columns that the trainer computes; no column of a completion may be called like one of them.
OWN_COLUMNS = frozenset(
    ("response_mask", "rollout_log_probs", "versions", "keep", "rollout_weight", "weight", "selected")
    + ("token_level_rewards", "advantages", "returns", "values")
    + ("log_probs", "old_log_probs", "ref_log_probs", "entropy", "sum_pi_squared", "full_kl")
    + ("tokens", "lengths", "micro_sizes")  # what is sent to a rank beside its columns
)


def make_batch(groups: Sequence[Sequence[Sample]], *, reward_parts: Sequence[str] = ()) -> Batch:
    """All samples of all groups, concatenated, each as prompt and completion.

    columns [N]
        response_mask       float32, 1 on the completion's tokens, its stop token included
        rollout_log_probs   float32, as the server reported them; 0 on the prompt
        versions            int32, of the weights that generated the token; -1 on the prompt
    and the completions' own columns [N, ...], of their dtypes
    per_sequence [B]
        score               float32, the reward
        group               int64, index into `groups`: samples of one visit of one prompt
        version_min, version_max   int64, oldest and newest weights that generated a token
        truncated           float32, 1 if the length limit ended the completion
        greedy_score        float32, the reward of a greedy completion, if all samples have one
        reward_parts        [B, K] float32, the numbers of the reward that `reward_parts` names, if any

    Raises: ValueError for a number of the reward or a column of a completion that not all samples have.
    """
    samples = [sample for group in groups for sample in group]
    assert samples, "a batch needs at least one sample"
    completions = [sample.completion for sample in samples]
    for sample in samples:
        _check(sample)
    parts = np.array([(len(s.prompt.token_ids), len(s.completion.token_ids)) for s in samples], dtype=np.int64)
    lengths = parts.sum(axis=1)
    num_tokens, num_written = int(lengths.sum()), int(parts[:, 1].sum())

    pieces = chain.from_iterable((s.prompt.token_ids, s.completion.token_ids) for s in samples)
    tokens = np.fromiter(chain.from_iterable(pieces), dtype=np.int64, count=num_tokens)
    mask = np.repeat(np.tile(np.array([0, 1], dtype=np.float32), len(samples)), parts.ravel())
    written = chain.from_iterable(completion.log_probs for completion in completions)
    log_probs = np.zeros(num_tokens, dtype=np.float32)
    log_probs[mask == 1] = np.fromiter(written, dtype=np.float32, count=num_written)
    spans = np.array([(s.version, s.end - s.start) for c in completions for s in c.versions], dtype=np.int32)
    versions = np.full(num_tokens, -1, dtype=np.int32)
    versions[mask == 1] = np.repeat(spans[:, 0], spans[:, 1])

    names = sample_names(groups)
    own = {"response_mask": mask, "rollout_log_probs": log_probs, "versions": versions}
    batch = Batch(
        tokens=torch.from_numpy(tokens),
        lengths=torch.from_numpy(lengths),
        columns={name: torch.from_numpy(column) for name, column in own.items()} | _carried(samples, names),
        per_sequence={
            "score": torch.tensor([sample.reward for sample in samples], dtype=torch.float32),
            "group": torch.repeat_interleave(torch.arange(len(groups)), torch.tensor([len(g) for g in groups])),
            "version_min": torch.tensor([min(span.version for span in c.versions) for c in completions]),
            "version_max": torch.tensor([max(span.version for span in c.versions) for c in completions]),
            "truncated": torch.tensor([float(c.finish_reason == "length") for c in completions]),
        },
    )
    greedy = [sample.greedy_reward for sample in samples if sample.greedy_reward is not None]
    if len(greedy) == len(samples):
        batch = batch.with_per_sequence(greedy_score=torch.tensor(greedy, dtype=torch.float32))
    if reward_parts:
        values = [[_part(s, key, name) for key in reward_parts] for s, name in zip(samples, names, strict=True)]
        batch = batch.with_per_sequence(reward_parts=torch.tensor(values, dtype=torch.float32))
    return batch


def sample_names(groups: Sequence[Sequence[Sample]]) -> list[str]:
    """The name of each sample in a batch of these groups: the prompt's uid and the place in the group, "0-17#2"."""
    return [f"{sample.prompt.uid}#{at}" for group in groups for at, sample in enumerate(group)]


def mini_batches(batch: Batch, prompts_per_step: int, *, seed: int | None) -> list[Batch]:
    """The batches of the optimizer steps of one epoch: whole prompt groups, `prompts_per_step` of them in each.

    If the number of groups is not a multiple, because rollouts were lost, the number of steps is rounded up and their
    sizes differ by at most one group, so that no step has only a few groups.
    `seed` shuffles the groups (None: keeps their order); per_sequence["group"] keeps its numbers.
    """
    assert prompts_per_step > 0, "a step needs at least one prompt"
    group = batch.per_sequence["group"]
    members: dict[int, list[int]] = {}
    for sequence, index in enumerate(group.tolist()):
        members.setdefault(index, []).append(sequence)
    names = list(members)
    if seed is not None:
        names = [names[i] for i in np.random.default_rng(seed).permutation(len(names))]
    num_steps = -(-len(names) // prompts_per_step)
    steps = np.array_split(np.arange(len(names)), num_steps)
    return [batch.select([sequence for at in step for sequence in members[names[at]]]) for step in steps]


def _part(sample: Sample, key: str, name: str) -> float:
    """One of the numbers that a reward function returned; 0 if it failed."""
    if key == "reward":
        return sample.reward
    if REWARD_ERROR in sample.reward_extra:
        return 0.0
    if key not in sample.reward_extra:
        has = ", ".join(["reward", *sample.reward_extra])
        raise ValueError(
            f"algorithm.reward_weights.{key}: the reward of sample {name} has no number of that name; expected one "
            f"that reward.fn returns for every sample (here: {has})"
        )
    return sample.reward_extra[key]


def _carried(samples: Sequence[Sample], names: Sequence[str]) -> dict[str, Tensor]:
    """The columns of the completions, [N, ...] each.

    Raises: ValueError for a name that the trainer uses, and for a column that is missing or different in some samples:
    an engine that answers for a part of them has a defect, and without the column they would be learnt otherwise.
    """
    found = {}
    for name in dict.fromkeys(name for sample in samples for name in sample.completion.columns):
        if name in OWN_COLUMNS:
            raise ValueError(f"column {name} of a completion: expected a name that the trainer does not use itself")
        parts = [sample.completion.columns.get(name) for sample in samples]
        kinds = ["no such column" if p is None else f"{p.dtype} {['N', *p.shape[1:]]}" for p in parts]
        for sample, part in zip(names, kinds, strict=True):
            if part != kinds[0]:
                raise ValueError(
                    f"column {name} of the completions: sample {sample} has {part}, sample {names[0]} {kinds[0]}; "
                    "expected the same of all samples of a step, so look at the engine that generated them"
                )
        found[name] = torch.from_numpy(np.concatenate([part for part in parts if part is not None]))
    return found


def _check(sample: Sample) -> None:
    completion = sample.completion
    uid, num_tokens = sample.prompt.uid, len(completion.token_ids)
    assert len(completion.log_probs) == num_tokens, (
        f"completion of prompt {uid} has {num_tokens} tokens and {len(completion.log_probs)} log-probs"
    )
    assert completion.versions, f"completion of prompt {uid} does not say which weights wrote it"
    ends = [0, *(span.end for span in completion.versions)]
    assert [*(span.start for span in completion.versions), num_tokens] == ends, (
        f"completion of prompt {uid} has {num_tokens} tokens, and versions of other ones: {completion.versions}"
    )
    for name, column in completion.columns.items():
        assert len(column) == len(sample.prompt.token_ids) + num_tokens, (
            f"completion of prompt {uid} has {len(column)} entries of column {name}, "
            f"expected {len(sample.prompt.token_ids)} + {num_tokens}"
        )
