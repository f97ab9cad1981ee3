"""A fake server that reports experts as SGLang does: those of a token are told by its position alone."""

from base64 import b64encode
from collections.abc import Callable
from typing import Any

import numpy as np
from aiohttp import web
from fake_servers import reply_to

from megarl.arch.routed_experts import RoutedExperts
from megarl.rollout.engine_columns import EngineRoutes

OF = RoutedExperts(num_layers=3, layers=(0, 2), num_experts=300, chosen=2)  # layer 1 has no experts
ROUTES = EngineRoutes(OF)


def experts_at(position: int) -> np.ndarray:
    """[all layers, experts of a token]: what the model chose when it read the token at this position."""
    return np.array([[position, position + 1], [0, 0], [290 - position, 7]])


def field_of(start: int, end: int) -> str:
    """As SGLang writes it, of the positions from `start` to `end`."""
    rows = np.array([experts_at(position) for position in range(start, end)])
    return b64encode(rows.astype("<i4").tobytes()).decode()


def entry(token: int) -> list[list[int]]:
    """The column's entry of a token: what the model chose when it read the token before."""
    return experts_at(token - 1)[[0, 2]].tolist()


class RoutingServer:
    """Writes token 7 + i as token i of a request, with its experts; the first replies may be of retracted requests.

    `before_reply`: called with the number of the request.
    """

    def __init__(self, num_lost: int = 0, before_reply: Callable[[int], object] = id) -> None:
        self.num_lost, self.before_reply = num_lost, before_reply
        self.version = "0"
        self.bodies: list[dict[str, Any]] = []

    async def __call__(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.bodies.append(body)
        num_asked, num_new = len(body["input_ids"]), body["sampling_params"]["max_new_tokens"]
        (item,) = reply_to([7 + i for i in range(num_new)], finish="length", spans=[(self.version, 0, num_new)])
        field = field_of(body["routed_experts_start_len"], num_asked + num_new - 1)
        item["meta_info"] |= {"routed_experts": field, "num_retractions": int(len(self.bodies) <= self.num_lost)}
        self.before_reply(len(self.bodies))
        return web.json_response([item])
