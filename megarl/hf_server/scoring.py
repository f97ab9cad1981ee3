"""A reward model from an HF folder behind SGLang's /classify: sequence classification, one pass for each request."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from aiohttp import web
from transformers import AutoModelForSequenceClassification
from transformers.utils import logging as transformers_logging

from megarl.hf_server.routes import application
from megarl.io.http_limits import json_object
from megarl.rollout.protocol import Route
from megarl.weights.hf.folder import check_finite


class ScoreModel:
    """Example: ScoreModel("/models/reward", torch.float32).scores([[5, 6, 7]]) -> [[0.25]].

    Raises ValueError for a folder whose weights lack the score head: transformers would draw a random one; and for
    weights that are NaN or infinite.
    """

    def __init__(self, folder: str, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        transformers_logging.disable_progress_bar()
        self.folder, self.device = folder, torch.device(device)
        model, found = AutoModelForSequenceClassification.from_pretrained(
            folder, dtype=dtype, attn_implementation="sdpa", local_files_only=True, output_loading_info=True
        )
        if missing := sorted(found["missing_keys"]):
            raise ValueError(f"{folder}: found no weight {missing[0]}, expected a model for sequence classification")
        self._model = model.eval().requires_grad_(False).to(self.device)
        for name, weight in self._model.named_parameters():
            check_finite(weight, name, folder)
        self.vocab_size: int = model.config.vocab_size
        self.context_length: int = model.config.max_position_embeddings

    def check(self, token_ids: Any) -> list[int]:
        """Raises ValueError for anything but ids of the vocabulary that fit into the context."""
        if not isinstance(token_ids, list) or not token_ids or not all(type(token) is int for token in token_ids):
            raise ValueError("input_ids: expected a list of token ids, or a list of such lists")
        if not 0 <= min(token_ids) <= max(token_ids) < self.vocab_size:
            raise ValueError(f"input_ids: expected ids from 0 to {self.vocab_size - 1}")
        if len(token_ids) > self.context_length:
            raise ValueError(f"input_ids: {len(token_ids)} tokens, expected at most {self.context_length}")
        return token_ids

    @torch.inference_mode()
    def scores(self, sequences: Sequence[list[int]]) -> list[list[float]]:
        """The head's numbers at the last token of each sequence.  Those of equal length share a pass: no padding."""
        by_length: dict[int, list[int]] = defaultdict(list)
        for at, sequence in enumerate(sequences):
            by_length[len(sequence)].append(at)
        out: dict[int, list[float]] = {}
        for places in by_length.values():
            ids = torch.tensor([sequences[at] for at in places], device=self.device)
            # Not the model's own pooling: it looks for the last token that is no padding, and the end may be one.
            last = self._model.base_model(input_ids=ids, use_cache=False).last_hidden_state[:, -1]
            out.update(zip(places, self._model.score(last).float().tolist(), strict=True))
        return [out[at] for at in range(len(sequences))]


class ScoreServer:
    """The HTTP side. Example: AppRunner(ScoreServer(model, token).app)."""

    def __init__(self, model: ScoreModel, token: str) -> None:
        self._model = model
        self._busy = asyncio.Lock()  # one pass at a time
        self.ended: asyncio.Future[BaseException | None] = asyncio.get_running_loop().create_future()
        self.app = application(token)
        self.app.router.add_get(Route.HEALTH, self.health)
        self.app.router.add_get(Route.SERVER_INFO, self.server_info)
        self.app.router.add_get(Route.MODEL_INFO, self.model_info)
        self.app.router.add_post(Route.CLASSIFY, self.classify)

    def end(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)

    async def health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def server_info(self, request: web.Request) -> web.Response:
        return web.json_response({"version": "megarl-hf", "model_path": self._model.folder, "is_embedding": True})

    async def model_info(self, request: web.Request) -> web.Response:
        return web.json_response({"model_path": self._model.folder, "is_generation": False})

    async def classify(self, request: web.Request) -> web.Response:
        """Of one sequence {"embedding": [score, ..], "meta_info": {..}}; of a list of them a list of that."""
        given = (await json_object(request)).get("input_ids")
        several = given if isinstance(given, list) and given and all(isinstance(each, list) for each in given) else None
        sequences = [self._model.check(each) for each in (several or [given])]
        async with self._busy:
            scores = await asyncio.to_thread(self._model.scores, sequences)
        replies = [
            {"embedding": numbers, "meta_info": {"prompt_tokens": len(ids)}}
            for ids, numbers in zip(sequences, scores, strict=True)
        ]
        return web.json_response(replies if several else replies[0])
