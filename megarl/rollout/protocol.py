"""The part of SGLang's HTTP API that a trainer uses: routes, request bodies, replies, dtype names, tensor digests.

Prompts and completions are token ids, so features that need text on the server (stop strings, grammars) are left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import Any, NamedTuple

import orjson
import torch

from megarl.rollout.wire_columns import EngineColumn, read_columns
from megarl.samples.sample import Completion, VersionSpan

GREEDY_BELOW = 1e-6  # a temperature under this is greedy, as in SGLang
MAX_SEED = 2**31 - 1
SAMPLING_LOG_PROBS = "output_token_sampling_logprobs"  # over the tokens that could be drawn: see EngineSupport
FINISH_REASONS = ("stop", "length", "abort")
_ROUNDED = 1e-3  # a server's kernels may round the probability of a sure token up
_LOWEST = -3.4e38  # a smaller log-prob is not finite in the trainer's float32


class Route(StrEnum):
    HEALTH = "/health"
    SERVER_INFO = "/server_info"
    MODEL_INFO = "/model_info"
    GENERATE = "/generate"
    PAUSE = "/pause_generation"
    CONTINUE = "/continue_generation"
    INIT_GROUP = "/init_weights_update_group"
    DESTROY_GROUP = "/destroy_weights_update_group"
    BEGIN_UPDATE = "/begin_weight_update"
    END_UPDATE = "/end_weight_update"
    UPDATE_FROM_DISTRIBUTED = "/update_weights_from_distributed"
    UPDATE_FROM_TENSOR = "/update_weights_from_tensor"
    UPDATE_FROM_DISK = "/update_weights_from_disk"
    WEIGHTS_CHECKER = "/weights_checker"
    MODELS = "/v1/models"
    LOAD_ADAPTER = "/load_lora_adapter_from_tensors"
    UNLOAD_ADAPTER = "/unload_lora_adapter"
    RELEASE_MEMORY = "/release_memory_occupation"
    RESUME_MEMORY = "/resume_memory_occupation"
    FLUSH_CACHE = "/flush_cache"
    ABORT = "/abort_request"
    LOADS = "/v1/loads"
    CLASSIFY = "/classify"  # of a reward model, which has no /generate


@dataclass(frozen=True)
class Abilities:
    """Features that only some versions of a server have."""

    update_sessions: bool  # weights are pushed between begin and end of an update
    version_spans: bool  # a completion has the weights version of each token, not only of the last one
    # An update flushes the prefix cache although requests are waiting (those that a pause retracted). Without this
    # feature such a flush crashes the server, so it has to run without a prefix cache.
    flush_beside_queue: bool
    cache_salt: bool  # requests of different salts share no KV
    # A request that is aborted in the queue no longer counts as a user of its adapter. Without this feature the server
    # waits for it without end when the adapter is unloaded (SGLang's issue 34205).
    frees_adapters: bool
    adapts_experts: bool  # it serves adapters of experts and of latent attention
    rereads_fp8: bool  # it reads a folder into fp8 weights that it holds; others would quantize these once more

    @staticmethod
    def of(version: str) -> Abilities:
        """By the version in /server_info: of SGLang, or of our HF server, which has all features."""
        numbers = tuple(int(part) for part in version.split(".")[:3] if part.isdecimal() and len(part) < 10)
        if len(numbers) < 3:  # our HF server, or a development version of SGLang
            numbers = (1, 0, 0)
        return Abilities(
            update_sessions=numbers >= (0, 5, 21),
            version_spans=numbers >= (0, 5, 20),
            flush_beside_queue=numbers >= (0, 5, 21),
            cache_salt=numbers >= (0, 5, 18),
            frees_adapters=numbers >= (0, 5, 22),
            adapts_experts=numbers >= (0, 5, 23),
            rereads_fp8=numbers >= (0, 5, 23),
        )


# A client closes a connection that was idle for so long.  Shorter than stock SGLang's 5 s: otherwise the server may
# close a connection while a request is on its way to it.
KEEP_ALIVE_S = 3.0
ROUTING_KEY = "x-smg-routing-key"  # header of a request: the router sends all of one key to one server
PAUSE_MODES = ("abort", "retract", "in_place")
FLATTENED = "flattened_bucket"  # load_format: one broadcast of the uint8 concatenation of all tensors

DTYPES: dict[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}

# How many bytes a reply may have.
ORDER_BYTES = 8 << 20  # what a server says of itself, or answers to an order
_LARGEST = 1 << 30  # of any reply
_BESIDE = 1 << 20  # in a reply, beside what was asked for
_TOKEN = 512  # its id, its log-probs and its text
_ENTRY = 64  # a log-prob and the id of its token
_DIGEST = 256  # of a tensor, with the name

# Keys that change the text, never the sampled tokens: accepted and ignored, because there is no text.
_TEXT_ONLY_KEYS = frozenset({"skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim"})


@dataclass(frozen=True)
class SamplingParams:
    """How completions are sampled.  Example: SamplingParams(temperature=0.7, top_p=0.9, max_new_tokens=256)."""

    temperature: float = 1.0  # 0 = greedy; then log-probs are of the softmax at temperature 1
    top_p: float = 1.0
    top_k: int = -1  # -1: all
    max_new_tokens: int = 128
    sampling_seed: int | None = None  # None: the server's seed is used
    stop_token_ids: tuple[int, ...] = ()  # in addition to the model's end-of-sequence tokens
    ignore_eos: bool = False  # neither EOS nor stop_token_ids end a completion

    def __post_init__(self) -> None:
        _check("temperature", self.temperature, (int, float), "a number >= 0", lambda v: 0 <= v < float("inf"))
        _check("top_p", self.top_p, (int, float), "0 < top_p <= 1", lambda v: 0 < v <= 1)
        _check("top_k", self.top_k, int, "-1 (all) or a whole number >= 1", lambda v: v == -1 or v >= 1)
        _check("max_new_tokens", self.max_new_tokens, int, "a whole number >= 1", lambda v: v >= 1)
        _check("ignore_eos", self.ignore_eos, bool, "true or false", lambda v: True)
        if self.sampling_seed is not None:
            _check("sampling_seed", self.sampling_seed, int, f"0 .. {MAX_SEED}", lambda v: 0 <= v <= MAX_SEED)
        for token in self.stop_token_ids:
            _check("stop_token_ids", token, int, "token ids >= 0", lambda v: v >= 0)

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    def as_greedy(self) -> SamplingParams:
        """Greedy sampling with the same length limit."""
        return replace(self, temperature=0.0, top_p=1.0, top_k=-1, sampling_seed=None)

    def to_json(self, n: int = 1) -> dict[str, Any]:
        """The `sampling_params` of a request body for `n` completions per prompt."""
        out = {**vars(self), "stop_token_ids": list(self.stop_token_ids), "n": n}
        if self.sampling_seed is None:
            del out["sampling_seed"]
        return out

    @staticmethod
    def from_json(body: Mapping[str, Any]) -> tuple[SamplingParams, int]:
        """Parse `sampling_params` on a server: parameters and n. Raises ValueError for unknown keys or bad values."""
        if not isinstance(body, Mapping):
            raise ValueError(f"sampling_params={body!r}: expected an object")
        values = {key: value for key, value in body.items() if key not in _TEXT_ONLY_KEYS and value is not None}
        n = values.pop("n", 1)
        _check("n", n, int, "a whole number >= 1", lambda v: v >= 1)
        known = {f.name for f in fields(SamplingParams)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ValueError(f"sampling_params has the unknown key {unknown[0]!r}: expected {sorted(known | {'n'})}")
        if not isinstance(values.get("stop_token_ids", []), list):
            raise ValueError(f"stop_token_ids={values['stop_token_ids']!r}: expected a list of token ids")
        values["stop_token_ids"] = tuple(values.get("stop_token_ids", ()))
        return SamplingParams(**values), n


def _check(name: str, value: Any, kind: Any, wanted: str, allowed: Any) -> None:
    wrong_type = not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool)
    if wrong_type or not allowed(value):
        raise ValueError(f"{name}={value!r}: expected {wanted}")


def generate_body(
    prompt_ids: Sequence[int],
    n: int,
    params: SamplingParams,
    rid: str,
    salt: str | None = None,
    *,
    columns: Sequence[EngineColumn] = (),
    num_known: int = 0,
    dp_rank: int | None = None,
) -> dict[str, Any]:
    """The body of /generate for `n` completions of one prompt, with log-probs of the completions only.

    `salt`: the server reuses KV of requests with the same salt only, which names one version of the weights of one run.
    `columns`: what is to travel with the tokens; the caller has that of the first `num_known` ones.  `dp_rank`: the
    server's data-parallel rank (attention group) that generates; None: the server chooses.
    """
    body: dict[str, Any] = {
        "input_ids": list(prompt_ids),
        "sampling_params": params.to_json(n),
        "return_logprob": True,
        "logprob_start_len": -1,
        "rid": rid,
        "cache_salt": salt,
    }
    if dp_rank is not None:
        body["routed_dp_rank"] = dp_rank
    for column in columns:
        body |= column.request(num_known)
    return body


_OWN = ("input_ids", "sampling_params", "rid", "cache_salt")  # may differ in requests that travel in one


def joint_key(body: Mapping[str, Any]) -> bytes:
    """The same for bodies of /generate that `joined_body` can join."""
    return orjson.dumps({name: value for name, value in body.items() if name not in _OWN}, option=orjson.OPT_SORT_KEYS)


def joined_body(bodies: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One body of /generate in place of several with one `joint_key`."""
    joined: dict[str, Any] = {**bodies[0], **{name: [body[name] for body in bodies] for name in _OWN}}
    joined["cache_salt"] = [salt or "" for salt in joined["cache_salt"]]  # a list holds no null; "" is none, too
    return joined


class Reply(NamedTuple):
    """One completion of a /generate reply, without text."""

    completion: Completion
    cached_tokens: int | None  # of the prompt, in the prefix cache; None: not reported
    rid: str | None  # of the request that it answers


def parse_replies(
    reply: Any, n: int, *, num_asked: int | None = None, columns: Sequence[EngineColumn] = (), num_known: int = 0
) -> list[Reply]:
    """The n completions of a /generate reply.  Raises ValueError for a reply of another shape, whatever it holds.

    `num_asked`: tokens of the request, which the reply's columns cover too; None: no reply has columns.  `columns`:
    those that were asked for with `num_known`; see wire_columns for ColumnsLost.
    """
    items = reply if isinstance(reply, list) else [reply]
    if len(items) != n:
        raise ValueError(f"the reply of {Route.GENERATE} holds {len(items)} completions, expected {n}")
    try:
        return [_reply(item, num_asked, columns, num_known) for item in items]
    except (ArithmeticError, AttributeError, LookupError, TypeError) as error:
        raise ValueError(f"a completion of {Route.GENERATE} cannot be read: {error!r}") from error


def _reply(item: Any, num_asked: int | None, columns: Sequence[EngineColumn], num_known: int) -> Reply:
    completion, meta = _completion(item, num_asked, columns, num_known), item["meta_info"]
    cached, read, rid = meta.get("cached_tokens"), meta.get("prompt_tokens"), meta.get("id")
    if not (cached is None or _is_count(cached)):
        raise ValueError(f"a completion has cached_tokens={cached!r}: expected a whole number")
    if not (read is None or num_asked is None or read == num_asked):
        raise ValueError(f"a completion is of {read!r} tokens of a prompt, and {num_asked} were asked with")
    return Reply(completion, cached, rid if isinstance(rid, str) else None)


def _completion(item: Any, num_asked: int | None, columns: Sequence[EngineColumn], num_known: int) -> Completion:
    try:
        token_ids, meta = item["output_ids"], item["meta_info"]
        finish_reason, triples = meta["finish_reason"]["type"], meta["output_token_logprobs"]
        of_all, written = [triple[0] for triple in triples], [triple[1] for triple in triples]
    except (IndexError, KeyError, TypeError) as error:
        raise ValueError(f"a completion of {Route.GENERATE} lacks {error}") from error
    if not isinstance(token_ids, list) or set(map(type, token_ids)) - {int} or (token_ids and min(token_ids) < 0):
        raise ValueError("the output_ids of a completion are no list of token ids")
    if written != token_ids:
        raise ValueError(f"a completion has {len(token_ids)} tokens and {len(triples)} log-probs of other tokens")
    if finish_reason not in FINISH_REASONS:
        raise ValueError(f"a completion ended for {finish_reason!r}: expected one of {', '.join(FINISH_REASONS)}")
    drawn = meta.get(SAMPLING_LOG_PROBS)
    log_probs = of_all if drawn is None else drawn
    if not isinstance(log_probs, list) or len(log_probs) != len(token_ids):
        number = len(log_probs) if isinstance(log_probs, list) else "no list of"
        raise ValueError(f"a completion has {len(token_ids)} tokens and {number} log-probs of its sampling")
    for values in (of_all,) if drawn is None else (of_all, drawn):
        if not _are_log_probs(values):
            wrong = next(value for value in values if not _are_log_probs([value]))
            raise ValueError(f"a completion has the log-prob {wrong!r}: expected a finite number of at most 0")
    return Completion(
        token_ids=token_ids,
        log_probs=log_probs,
        finish_reason=finish_reason,
        versions=_versions(meta, len(token_ids)),
        columns=read_columns(meta, num_asked, len(token_ids), columns, num_known),
    )


def _are_log_probs(values: Sequence[Any]) -> bool:
    if not set(map(type, values)) <= {int, float}:  # bool is none of them
        return False
    return not values or (min(values) >= _LOWEST and max(values) <= _ROUNDED and not math.isnan(sum(values)))


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0  # bool is an int too


def _versions(meta: Mapping[str, Any], num_tokens: int) -> tuple[VersionSpan, ...]:
    """Version spans as the server reports them; an older server reports one version for the whole completion."""
    if num_tokens == 0:
        return ()
    spans = meta.get("weight_versions") or [{"version": meta.get("weight_version"), "start": 0, "end": num_tokens}]
    out = tuple(VersionSpan(_version(span["version"]), span["start"], span["end"]) for span in spans)
    edges = [0, *(span.end for span in out)]
    is_whole = [span.start for span in out] == edges[:-1] and edges[-1] == num_tokens
    if not is_whole or not all(map(_is_count, edges)) or edges != sorted(edges):
        raise ValueError(f"weight_versions {spans} do not cover the {num_tokens} tokens of a completion")
    return out


def _version(text: Any) -> int:
    if not str(text).isdecimal():
        raise ValueError(f"weight_version {text!r} is not a decimal number: start the server with --weight-version 0")
    return int(text)


def completion_bytes(num_asked: int, params: SamplingParams, columns: Sequence[EngineColumn] = ()) -> int:
    """A completion with its columns, of a request with `num_asked` tokens."""
    of_columns = sum(column.most_bytes for column in columns) * (num_asked + params.max_new_tokens)
    return min(_LARGEST, _BESIDE + _TOKEN * params.max_new_tokens + of_columns)


def score_bytes(count: int, top_k: int = 0) -> int:
    """The log-probs of `count` given tokens, each beside the `top_k` most likely ones."""
    return min(_LARGEST, _BESIDE + _ENTRY * count * (1 + top_k))


def digest_bytes(num_tensors: int, num_ranks: int = 1) -> int:
    """The digests of a model's tensors on each rank of a server.

    With attention data parallelism each group, of a rank or more, answers for all ranks.
    """
    return min(_LARGEST, _BESIDE + _DIGEST * num_tensors * num_ranks**2)


def auth_headers(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"} if token else {}


def error_message(text: str, otherwise: str) -> str:
    """The message in an error reply, in any of SGLang's formats; `otherwise` if the reply is empty."""
    try:
        value = orjson.loads(text)
    except ValueError:  # plain text
        return text.strip()[:500] or otherwise
    for key in ("message", "error_message", "error", "detail"):
        if isinstance(value, dict) and key in value:
            inner = value[key]
            return str(inner.get("message", inner)) if isinstance(inner, dict) else str(inner)
    return str(value)[:500]
