"""One router in a pass with given experts: which it takes, when layers are computed again, and its gradient."""

import pytest
import torch
from torch import Tensor

from megarl.mcore.training.router_replay import RouterReplay

SCORES = torch.tensor([[0.1, 0.9, 0.3, 0.2], [0.8, 0.1, 0.4, 0.7]])
GIVEN = torch.tensor([[2, 0], [1, 3]], dtype=torch.uint8)
OTHER = torch.tensor([[3, 1], [0, 2]], dtype=torch.uint8)


def top(scores: Tensor, k: int, *, num_groups: int | None, group_topk: int | None) -> tuple[Tensor, Tensor]:
    assert (num_groups, group_topk) == (4, 2), "as the router was configured"
    return torch.topk(scores, k, dim=1)


def ask(replay: RouterReplay, scores: Tensor = SCORES) -> tuple[list[list[float]], list[list[int]]]:
    """As Megatron's topk_routing_with_score_function does."""
    values, experts = replay.get_replay_topk(scores, 2, 4, 2, top)
    assert experts.dtype == torch.int64
    return values.tolist(), experts.tolist()


def test_a_router_chooses_freely_unless_experts_are_given() -> None:
    replay = RouterReplay(0)
    assert ask(replay)[1] == [[1, 2], [0, 3]]
    assert replay.chosen is None
    replay.given = GIVEN
    values, experts = ask(replay)
    assert experts == GIVEN.tolist()
    assert torch.equal(torch.tensor(values), torch.tensor([[0.3, 0.1], [0.1, 0.7]])), "its own scores of them"
    replay.given = None
    assert ask(replay)[1] == [[1, 2], [0, 3]]


def test_what_a_router_chose_is_noted_only_in_a_pass_that_wants_it() -> None:
    replay = RouterReplay(0)
    replay.reset(notes=True)
    ask(replay)
    assert replay.chosen is not None
    assert replay.chosen.tolist() == [[1, 2], [0, 3]]
    replay.reset()
    assert replay.chosen is None


def test_layers_computed_again_get_the_experts_of_their_rows_in_the_order_of_these() -> None:
    """1F1B: the forward passes of two rows, the backward pass of the first, a third row, and so on."""
    replay = RouterReplay(0)
    replay.reset(trains=True)

    def forward(experts: Tensor) -> None:
        replay.given = experts
        with torch.no_grad():  # as a checkpoint runs its first pass
            assert ask(replay)[1] == experts.tolist()
        replay.given = None

    forward(GIVEN)
    forward(OTHER)
    assert ask(replay)[1] == GIVEN.tolist()
    forward(GIVEN.flip(0))
    assert ask(replay)[1] == OTHER.tolist()
    assert ask(replay)[1] == GIVEN.flip(0).tolist()
    assert ask(replay)[1] == [[1, 2], [0, 3]], "nothing is left"


def test_layers_that_are_kept_leave_nothing_behind() -> None:
    replay = RouterReplay(0)
    replay.reset(trains=True)
    replay.given = GIVEN
    ask(replay, SCORES.clone().requires_grad_())
    assert not replay.again
    replay.reset()
    replay.given = GIVEN
    with torch.no_grad():  # a pass without gradients is never computed again
        ask(replay)
    assert not replay.again


def test_the_gradient_is_that_of_the_scores_of_the_given_experts() -> None:
    replay = RouterReplay(0)
    replay.given = GIVEN
    scores = SCORES.clone().requires_grad_()
    values, _ = replay.get_replay_topk(scores, 2, 4, 2, top)
    (values * torch.tensor([[1.0, 2.0], [3.0, 4.0]])).sum().backward()
    assert scores.grad is not None
    assert scores.grad.tolist() == [[2, 0, 1, 0], [0, 3, 0, 4]]


def test_experts_of_other_tokens_are_no_silent_mistake() -> None:
    replay = RouterReplay(0)
    replay.given = GIVEN[:1]
    with pytest.raises(AssertionError, match=r"experts \(1, 2\) given for 2 tokens"):
        ask(replay)
