"""HTTP client of one server, SGLang's or the HF server: `ServerClient`; and one call to many servers: `of_all`."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from megarl.io.http_calls import Answer, Caller, CallFailed
from megarl.io.tls import trusted
from megarl.processes import watchdog
from megarl.rollout.protocol import (
    FLATTENED,
    KEEP_ALIVE_S,
    ORDER_BYTES,
    Abilities,
    Route,
    SamplingParams,
    auth_headers,
    error_message,
    score_bytes,
)

T = TypeVar("T")


class ServerError(RuntimeError):
    """A server refused a request or failed. One sentence: url, route, status (0: no answer), message."""

    def __init__(self, url: str, route: str, status: int, message: str) -> None:
        super().__init__(f"{url}{route} answered {status}: {message}" if status else f"{url}{route} failed: {message}")
        self.url = url
        self.route = route
        self.status = status
        self.message = message


class Load(NamedTuple):
    """How full a server is, or one of its data-parallel parts."""

    running: int  # requests
    waiting: int  # requests in its queue
    kv_share: float  # tokens in the KV cache over the most that it can hold


@dataclass(frozen=True)
class Scores:
    """Log-probs of a sequence's tokens from `start` on, at temperature 1, and each one's `top_k` most likely tokens."""

    log_probs: list[float]
    top_ids: list[list[int]]
    top_log_probs: list[list[float]]


class ServerClient:
    """Example: server = ServerClient("http://127.0.0.1:30000", token, timeout_s=60); server.pause(); server.resume()

    Every method raises ServerError when the server refuses, fails, has not sent its whole answer within `timeout_s`, or
    sends more than an answer to this request may have.
    """

    def __init__(self, url: str, token: str, *, timeout_s: float = 120.0) -> None:
        self.url = url.rstrip("/")
        self._caller = Caller(auth_headers(token), trusted(url, token), keep_alive_s=KEEP_ALIVE_S)
        self._timeout_s = timeout_s
        self._abilities: Abilities | None = None

    def close(self) -> None:
        self._caller.close()

    # ---- questions

    def health(self) -> None:
        """Returns if the server can serve."""
        self._call(Route.HEALTH, None)

    def server_info(self) -> dict[str, Any]:
        return self._json(Route.SERVER_INFO)

    @property
    def abilities(self) -> Abilities:
        """Features of this server's version; requested once."""
        if self._abilities is None:
            info = self.server_info()
            with self.reading(Route.SERVER_INFO):
                self._abilities = Abilities.of(str(info.get("version", "")))
        return self._abilities

    def model_info(self) -> dict[str, Any]:
        return self._json(Route.MODEL_INFO)

    def loads(self) -> list[Load]:
        """One for each data-parallel part of the server."""
        reply = self._json(Route.LOADS)
        with self.reading(Route.LOADS):
            return [
                Load(
                    int(part["num_running_reqs"]),
                    int(part["num_waiting_reqs"]),
                    part["num_used_tokens"] / part["max_total_num_tokens"],
                )
                for part in reply["loads"]
            ]

    def checksums(self) -> dict[str, str]:
        """Digest of every tensor the server holds, by name; with several tensor-parallel ranks by "rank:name"."""
        ranks = self.rank_checksums()
        if len(ranks) == 1:
            return ranks[0]
        return {f"{i}:{name}": digest for i, rank in enumerate(ranks) for name, digest in rank.items()}

    def rank_checksums(self, most_bytes: int = ORDER_BYTES) -> list[dict[str, str]]:
        """Digest of every tensor by its name on each tensor-parallel rank; `most_bytes`: see protocol.digest_bytes.

        With attention data parallelism each group answers for all ranks; equal answers count once.
        """
        reply = self._accepted(Route.WEIGHTS_CHECKER, {"action": "checksum"}, most_bytes=most_bytes)
        found: list[dict[str, Any]] = []
        seen: set[str] = set()
        with self.reading(Route.WEIGHTS_CHECKER):
            for rank in reply["ranks"]:
                who = json.dumps([rank.get("parallelism_info"), rank.get("per_gpu_checksum")])
                if rank.get("parallelism_info") is None or who not in seen:
                    found.append(dict(rank["checksums"]))
                seen.add(who)
        return found

    def prompt_log_probs(self, prompt_ids: Sequence[int], adapter: str | None = None) -> list[float]:
        """Log-probs of all tokens of a prompt except the first, also of those in the server's prefix cache."""
        body = score_body(prompt_ids, 1) | ({} if adapter is None else {"lora_path": adapter})
        reply = self._json(Route.GENERATE, body, most_bytes=score_bytes(len(prompt_ids)))
        with self.reading(Route.GENERATE):
            _, *found = (triple[0] for triple in reply["meta_info"]["input_token_logprobs"])
            # JSON has no NaN: servers say null in its place.
            return [math.nan if value is None else float(value) for value in found]

    def scores(self, token_ids: Sequence[int], start: int, top_k: int = 0) -> Scores:
        """Log-probs at temperature 1 of a sequence's tokens from `start` on, and the most likely tokens there."""
        most_bytes = score_bytes(len(token_ids) - start, top_k)
        reply = self._json(Route.GENERATE, score_body(token_ids, start, top_k), most_bytes=most_bytes)
        try:
            return parse_scores(reply, len(token_ids) - start, top_k)
        except ValueError as error:
            raise ServerError(self.url, Route.GENERATE, 200, str(error)) from error

    # ---- running

    def pause(self, mode: str = "retract") -> None:
        """abort: end running requests; retract: requeue them, with a new prefill later; in_place: keep their KV."""
        self._call(Route.PAUSE, {"mode": mode})

    def resume(self) -> None:
        self._call(Route.CONTINUE, {})

    def abort(self, rid: str = "", *, everything: bool = False) -> None:
        """End one request, or all; they return the tokens generated so far."""
        self._call(Route.ABORT, {"rid": rid, "abort_all": everything})

    def flush_cache(self) -> None:
        self._call(Route.FLUSH_CACHE, {})

    def wait_until_idle(self, timeout_s: float = 30.0) -> None:
        """Wait until the server computes nothing, and flush its cache.  Raises ServerError after `timeout_s`.

        A completion returns a moment before the scheduler is idle; stock SGLang ends if it has to release memory then.
        """
        self._call(Route.FLUSH_CACHE, {}, f"?timeout={timeout_s}")

    def release_memory(self, tags: Sequence[str] | None = None) -> None:
        """Release memory ("weights", "kv_cache"; None: all). The server has to be idle: see wait_until_idle."""
        self._call(Route.RELEASE_MEMORY, {} if tags is None else {"tags": list(tags)})

    def resume_memory(self, tags: Sequence[str] | None = None) -> None:
        """Resume released memory. Stock SGLang crashes if the memory was not released."""
        self._call(Route.RESUME_MEMORY, {} if tags is None else {"tags": list(tags)})

    # ---- weights

    def init_group(
        self, master_address: str, master_port: int, *, rank_offset: int, world_size: int, group_name: str, backend: str
    ) -> None:
        """Join a weight group; returns only when all members have joined, so call it in a separate thread."""
        body = {"master_address": master_address, "master_port": master_port, "rank_offset": rank_offset}
        body |= {"world_size": world_size, "group_name": group_name, "backend": backend}
        self._accepted(Route.INIT_GROUP, body)

    def destroy_group(self, group_name: str) -> None:
        self._accepted(Route.DESTROY_GROUP, {"group_name": group_name})

    def begin_update(self) -> None:
        """Open an update session; does nothing for server versions without update sessions."""
        if self.abilities.update_sessions:
            self._accepted(Route.BEGIN_UPDATE, {})

    def end_update(self) -> None:
        if self.abilities.update_sessions:
            self._accepted(Route.END_UPDATE, {})

    def update_from_distributed(
        self,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        *,
        group_name: str,
        version: int | None = None,
        flush_cache: bool = True,
    ) -> None:
        """The server receives these tensors from rank 0 of the group.

        Returns after the broadcast, one of all their bytes, concatenated, so call it in a thread.  A server that
        refuses the update joins no broadcast.  `version` stamps the tokens generated from now on: pass it with the last
        bucket.
        """
        body: dict[str, Any] = {"names": list(names), "dtypes": list(dtypes), "shapes": [list(s) for s in shapes]}
        body |= {"group_name": group_name, "load_format": FLATTENED}
        self._accepted(Route.UPDATE_FROM_DISTRIBUTED, body | self._after_update(version, flush_cache))

    def update_from_tensor(
        self,
        payloads: Sequence[str],
        *,
        load_format: str | None = FLATTENED,
        version: int | None = None,
        flush_cache: bool = True,
    ) -> None:
        """Each tensor-parallel rank of the server loads its payload: base64 of pickled handles of shared memory."""
        body: dict[str, Any] = {"serialized_named_tensors": list(payloads), "load_format": load_format}
        self._accepted(Route.UPDATE_FROM_TENSOR, body | self._after_update(version, flush_cache))

    def update_from_disk(
        self,
        model_path: str,
        *,
        version: int | None = None,
        flush_cache: bool = True,
        load_format: str | None = None,
    ) -> None:
        """Make the server read the weights of a folder; `load_format`: in this way, None: as at its start."""
        body = {"model_path": model_path, **self._after_update(version, flush_cache)}
        self._accepted(Route.UPDATE_FROM_DISK, body | ({"load_format": load_format} if load_format else {}))

    def _after_update(self, version: int | None, flush_cache: bool) -> dict[str, Any]:
        flush = flush_cache and self.abilities.flush_beside_queue  # otherwise the server runs without a prefix cache
        return {"flush_cache": flush, "weight_version": None if version is None else str(version)}

    # ---- adapters

    def adapters(self) -> list[str]:
        """Names of the LoRA adapters that the server holds."""
        models = self._json(Route.MODELS).get("data", [])
        with self.reading(Route.MODELS):
            return [str(model["id"]) for model in models if model.get("parent") is not None]  # the others: base models

    def load_adapter(
        self, name: str, config: Mapping[str, Any], payloads: Sequence[str], checksums: Mapping[str, str]
    ) -> None:
        """Add a LoRA adapter to the server; requests to /generate select it with lora_path.  `name` must be new.

        `config`: PEFT's adapter_config.json.  `payloads`: of all tensors, under PEFT's names, for each tensor-parallel
        rank; an empty one is that of the first rank, for servers with our custom weight loader.  Refused if a tensor's
        sha256 differs from `checksums` (64 hex digits of each tensor's bytes); a server without that loader then ends.
        """
        body: dict[str, Any] = {"lora_name": name, "config_dict": dict(config), "expected_checksums": dict(checksums)}
        body |= {"serialized_named_tensors": list(payloads), "load_format": FLATTENED}
        self._accepted(Route.LOAD_ADAPTER, body)

    def unload_adapter(self, name: str) -> None:
        """Returns when the last completion that uses the adapter has ended; hangs while such a completion is paused."""
        self._accepted(Route.UNLOAD_ADAPTER, {"lora_name": name})

    # ---- the wire

    def _call(
        self, route: Route, body: dict[str, Any] | None, query: str = "", most_bytes: int = ORDER_BYTES
    ) -> Answer:
        """A POST of the body; None: a GET."""
        url, method = self.url + route + query, "GET" if body is None else "POST"
        try:
            reply = self._caller.call(method, url, body, within_s=self._timeout_s, most_bytes=most_bytes)
        except CallFailed as error:
            raise ServerError(self.url, route, 0, str(error)) from error
        if reply.status != 200:
            raise ServerError(self.url, route, reply.status, error_message(reply.text, reply.reason))
        return reply

    def _json(
        self, route: Route, body: dict[str, Any] | None = None, *, most_bytes: int = ORDER_BYTES
    ) -> dict[str, Any]:
        reply = self._call(route, body, most_bytes=most_bytes)
        try:
            value = json.loads(reply.content)
        except (ValueError, RecursionError) as error:
            raise ServerError(self.url, route, 200, f"not JSON: {reply.text[:200]!r}") from error
        if not isinstance(value, dict):
            raise ServerError(self.url, route, 200, f"not a JSON object: {reply.text[:200]!r}")
        return value

    @contextmanager
    def reading(self, route: Route) -> Iterator[None]:
        """Turns the errors of reading a reply into a ServerError."""
        try:
            yield
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise ServerError(self.url, route, 200, f"the reply cannot be read: {error!r}") from error

    def _accepted(self, route: Route, body: dict[str, Any], *, most_bytes: int = ORDER_BYTES) -> dict[str, Any]:
        """For routes that return {"success": ..., "message": ...}."""
        value = self._json(route, body, most_bytes=most_bytes)
        if value.get("success") is not True:
            raise ServerError(self.url, route, 200, str(value.get("message", value)))
        return value


def score_body(token_ids: Sequence[int], start: int, top_k: int = 0) -> dict[str, Any]:
    """The body of /generate for the log-probs of the tokens from `start` on, 1 or more.

    It also asks for a new token, which is not read, since not every server accepts a request for none.
    """
    return {
        "input_ids": list(token_ids),
        "sampling_params": SamplingParams(temperature=0.0, max_new_tokens=1).to_json(),
        "return_logprob": True,
        "logprob_start_len": start - 1,  # the first entry of a reply has no log-prob
        "top_logprobs_num": top_k,
    }


def parse_scores(reply: Any, count: int, top_k: int = 0) -> Scores:
    """The scores of `count` tokens.  Raises ValueError for a reply of another shape."""
    try:
        meta = reply["meta_info"]
        log_probs = [entry[0] for entry in meta["input_token_logprobs"][1:]]
        tops = meta["input_top_logprobs"][1:] if top_k else [[]] * count
        found = Scores(log_probs, *([[entry[i] for entry in top] for top in tops] for i in (1, 0)))
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(f"a reply of {Route.GENERATE} has no log-probs of its prompt: {error!r}") from error
    if None in found.log_probs or any(None in top for top in found.top_log_probs):  # in place of what is not finite
        raise ValueError(f"a reply of {Route.GENERATE} has null in place of a log-prob: it is not a number")
    sizes = {len(found.log_probs), len(found.top_ids)}
    if sizes != {count} or any(len(top) != top_k for top in found.top_ids):
        raise ValueError(
            f"a reply of {Route.GENERATE} has {len(log_probs)} log-probs and {len(found.top_ids)} lists of tokens; "
            f"expected {count} with {top_k} tokens each"
        )
    return found


def of_all(urls: Sequence[str], act: Callable[[str], T]) -> tuple[dict[str, T], dict[str, ServerError]]:
    """Call `act` for all servers at once: url -> its result, and url -> the error of those that failed."""
    with ThreadPoolExecutor(max(1, len(urls)), thread_name_prefix="servers") as threads:
        asked = {url: threads.submit(act, url) for url in urls}
        watchdog.wait_for(asked.values())
    errors = {url: one.exception() for url, one in asked.items()}
    failed = {url: error for url, error in errors.items() if isinstance(error, ServerError)}
    return {url: one.result() for url, one in asked.items() if url not in failed}, failed
