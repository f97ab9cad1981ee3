"""The divergence from teachers by its definition: whole logits in float64, one token at a time, autograd."""

from collections.abc import Sequence

import torch
from torch import Tensor


def plain_divergence(
    name: str,
    beta: float,
    hidden: Tensor,
    weight: Tensor,
    teacher: Tensor,
    states: Tensor,
    heads: Sequence[Tensor],
    vocab_size: int,
    temperature: float,
) -> Tensor:
    """[T] float64."""
    found = []
    for t, number in enumerate(teacher.tolist()):
        if not number:
            found.append(torch.zeros((), dtype=torch.float64))
            continue
        head = heads[number - 1]
        p = (hidden[t].double() @ weight[:vocab_size].double().T / temperature).softmax(-1)
        q = (states[t, : head.size(1)].double() @ head[:vocab_size].double().T / temperature).softmax(-1)
        found.append(of_probabilities(name, beta, p, q))
    return torch.stack(found)


def of_probabilities(name: str, beta: float, p: Tensor, q: Tensor) -> Tensor:
    """Of the policy's p [..., V] and the teacher's q."""
    m = beta * q + (1 - beta) * p
    terms = {
        "reverse_kl": p * (p / q).log(),
        "forward_kl": q * (q / p).log(),
        "jsd": beta * q * (q / m).log() + (1 - beta) * p * (p / m).log(),
    }
    return terms[name].sum(-1)
