"""The JSON of /generate on the server: reads a body into a `Call`, and writes the reply of a finished call."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from megarl.arch.routed_experts import INDEXED_KEYS, ROUTED_EXPERTS, IndexedKeys, RoutedExperts
from megarl.hf_server.model import HFModel
from megarl.hf_server.running_batch import Call, CompletionRequest
from megarl.rollout.protocol import SamplingParams
from megarl.rollout.wire_columns import column_to_json

MAX_COMPLETIONS = 4096  # of one request


def read_call(body: Any, model: HFModel, max_total_tokens: int) -> Call:
    """Check the body and build the call. Raises ValueError with a sentence for anything the engine does not support."""
    if not isinstance(body, Mapping):
        raise ValueError("the body of /generate is not a JSON object")
    prompts = _prompts(body.get("input_ids"))
    asked = [SamplingParams.from_json(each) for each in _params(body.get("sampling_params"), len(prompts))]
    n = asked[0][1]
    if any(own != n for _, own in asked):
        raise ValueError("sampling_params: expected the same n for every prompt")
    if n * len(prompts) > MAX_COMPLETIONS:
        raise ValueError(f"n={n} for {len(prompts)} prompts: expected at most {MAX_COMPLETIONS} completions a request")
    rids = _rids(body.get("rid"), len(prompts))
    salts = _salts(body.get("cache_salt"), len(prompts))
    start = body.get("logprob_start_len", -1)
    if not isinstance(start, int) or isinstance(start, bool) or start < -1:
        raise ValueError(f"logprob_start_len={start!r}: expected -1 (none) or a position of the prompt")
    reports = model.routes if body.get("return_routed_experts") else None
    if body.get("return_routed_experts") and reports is None:
        raise ValueError("return_routed_experts: expected a server started with --enable-return-routed-experts")
    reports_from = body.get("routed_experts_start_len", 0)
    scored_from = start if body.get("return_logprob") and start >= 0 else None
    reports_support = body.get("return_sampling_mask") or False
    if not isinstance(reports_support, bool):
        raise ValueError(f"return_sampling_mask={reports_support!r}: expected true or false")
    num_top = body.get("top_logprobs_num") or 0
    if type(num_top) is not int or not 0 <= num_top <= model.vocab_size:
        raise ValueError(f"top_logprobs_num={num_top!r}: expected 0 (none) to {model.vocab_size}, the whole vocabulary")
    if num_top and scored_from is None:
        raise ValueError(
            f"top_logprobs_num={num_top}: expected return_logprob=true and logprob_start_len=POSITION, because this "
            "server reports the most likely tokens of prompts only"
        )
    call = Call()
    for prompt, (params, _), rid, salt in zip(prompts, asked, rids, salts, strict=True):
        stops = () if params.ignore_eos else (*model.eos_ids, *params.stop_token_ids)
        _check_prompt(prompt, params.max_new_tokens, model, max_total_tokens)
        if type(reports_from) is not int or not 0 <= reports_from < len(prompt):
            raise ValueError(
                f"routed_experts_start_len={reports_from!r}: expected 0 to {len(prompt) - 1}, a position of the prompt"
            )
        call.add(
            n,
            *(rid, prompt, params, stops),
            salt=salt,
            prompt_log_probs_from=scored_from,
            num_top=num_top,
            reports=reports,
            reports_keys=model.keys if reports and body.get("return_indexer_topk") else None,
            reports_from=reports_from,
            reports_support=reports_support,
        )
    return call


def _prompts(input_ids: Any) -> list[list[int]]:
    nested = isinstance(input_ids, list) and bool(input_ids) and isinstance(input_ids[0], list)
    prompts = input_ids if nested else [input_ids]
    for prompt in prompts:
        if not isinstance(prompt, list) or not prompt or any(type(token) is not int for token in prompt):
            raise ValueError("input_ids: expected a list of token ids, or a list of such lists, none of them empty")
    return prompts


def _params(params: Any, num_prompts: int) -> list[Any]:
    """Those of each prompt, as they came: one object for all, or a list of as many."""
    settings = params if isinstance(params, list) else [params or {}] * num_prompts
    if len(settings) != num_prompts:
        raise ValueError(f"{len(settings)} sampling_params for {num_prompts} prompts: expected one, or one for each")
    return settings


def _rids(rid: Any, num_prompts: int) -> list[str]:
    if rid is None:
        return [uuid.uuid4().hex for _ in range(num_prompts)]
    rids = rid if isinstance(rid, list) else [rid] if num_prompts == 1 else [f"{rid}_{i}" for i in range(num_prompts)]
    if len(rids) != num_prompts or not all(isinstance(r, str) for r in rids):
        raise ValueError(f"rid={rid!r}: expected a string, or one string for each of the {num_prompts} prompts")
    return rids


def _salts(salt: Any, num_prompts: int) -> list[str | None]:
    salts = salt if isinstance(salt, list) else ["" if salt is None else salt] * num_prompts
    if len(salts) != num_prompts or not all(isinstance(s, str) for s in salts):
        raise ValueError(
            f"cache_salt={salt!r}: expected a string, null, or one string for each of {num_prompts} prompts"
        )
    return [s or None for s in salts]  # an empty one is none, as in SGLang


def _check_prompt(prompt: list[int], max_new_tokens: int, model: HFModel, max_total_tokens: int) -> None:
    if min(prompt) < 0 or max(prompt) >= model.vocab_size:
        wrong = next(token for token in prompt if not 0 <= token < model.vocab_size)
        raise ValueError(f"input_ids holds {wrong}: expected token ids from 0 to {model.vocab_size - 1}")
    length = len(prompt) + max_new_tokens
    limits = ((model.context_length, "the model's context"), (max_total_tokens, "the server's max_total_tokens"))
    limit, name = min(limits)
    if length > limit:
        raise ValueError(f"{len(prompt)} prompt tokens and max_new_tokens={max_new_tokens} exceed {limit}, {name}")


def write_reply(call: Call, body: Mapping[str, Any]) -> Any:
    """One object for one completion, otherwise a flat list: completions of the first prompt, then of the next."""
    with_log_probs = bool(body.get("return_logprob"))
    several = sum(row.rid == call.rows[0].rid for row in call.rows) > 1
    items = [_item(row, with_log_probs, several) for row in call.rows]
    return items if len(items) > 1 or isinstance(body["input_ids"][0], list) else items[0]


def _item(row: CompletionRequest, with_log_probs: bool, several: bool) -> dict[str, Any]:
    spans = _spans(row)
    meta: dict[str, Any] = {
        "id": f"{row.rid}-{row.index}" if several else row.rid,
        "finish_reason": row.finish,
        "prompt_tokens": len(row.prompt),
        "completion_tokens": len(row.token_ids),
        "cached_tokens": row.cached_tokens,
        "num_retractions": row.num_retractions,
        "weight_version": spans[-1]["version"] if spans else None,
        "weight_versions": spans,
    }
    if with_log_probs:
        meta["input_token_logprobs"] = _prompt_log_probs(row)
        if row.num_top:
            meta["input_top_logprobs"] = _prompt_top(row)
        meta["output_token_logprobs"] = [
            [log_prob, token, None] for log_prob, token in zip(row.log_probs, row.token_ids, strict=True)
        ]
        meta["output_token_logprobs_length"] = len(row.token_ids)
    if row.reports_support:
        meta["output_token_sampling_mask"] = row.support
        meta["output_token_sampling_logprobs"] = row.log_probs_in_support
        meta["output_token_sampling_mask_length"] = len(row.support)
    if row.reports and row.token_ids:
        # The token at `reports_from` was read in the pass that generated the next one.
        start = row.reports_from + 1 if row.reports_from else 0
        width = len(row.reports.layers) * row.reports.chosen
        meta["columns"] = {ROUTED_EXPERTS: column_to_json(_routes(row, row.reports), start)}
        if row.reports_keys:
            meta["columns"][INDEXED_KEYS] = column_to_json(_column(row, row.reports_keys, slice(width, None)), start)
    return {"text": "", "output_ids": row.token_ids, "meta_info": meta}


def _routes(row: CompletionRequest, of: RoutedExperts) -> np.ndarray:
    """[P + T, layers with experts, experts of a token]: of each token those of the pass that generated it."""
    return _column(row, of, slice(len(of.layers) * of.chosen))


def _column(row: CompletionRequest, of: RoutedExperts | IndexedKeys, part: slice) -> np.ndarray:
    """[P + T, layers, choices], which are this part of what was noted of each token."""
    chosen = torch.cat(row.routes)[:, part].numpy().reshape(-1, len(of.layers), of.chosen)
    return np.concatenate([np.zeros_like(chosen[:1]), chosen]).astype(of.dtype)


def _spans(row: CompletionRequest) -> list[dict[str, Any]]:
    if not row.versions:  # aborted while it was waiting
        return []
    ends = [*(start for _, start in row.versions[1:]), len(row.token_ids)]
    return [
        {"version": version, "start": start, "end": end}
        for (version, start), end in zip(row.versions, ends, strict=True)
        if end > start
    ]


def _prompt_log_probs(row: CompletionRequest) -> list[list[Any]]:
    """[log-prob, token, text] from the requested position on; the first entry has no log-prob, as in SGLang."""
    start = row.prompt_log_probs_from
    if start is None or row.prompt_log_probs is None:
        return []
    triples: list[list[Any]] = [[row.prompt_log_probs[i - 1], row.prompt[i], None] for i in range(1, len(row.prompt))]
    triples = [[None, row.prompt[0], None], *triples][start:]
    return [[None, *triples[0][1:]], *triples[1:]] if triples else []


def _prompt_top(row: CompletionRequest) -> list[Any]:
    """[[log-prob, token, text], ..] of the most likely tokens for the same positions, None at the first of them."""
    start = row.prompt_log_probs_from
    if start is None or row.prompt_log_probs is None:
        return []
    entries = [None, *row.prompt_top][start:]
    return [None, *entries[1:]] if entries else []
