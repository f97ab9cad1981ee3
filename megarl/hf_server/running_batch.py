"""One completion from arrival to reply, the call that it belongs to, and the batch that is decoded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megarl.arch.routed_experts import IndexedKeys, RoutedExperts
from megarl.hf_server.sampling import draw, row_key, support, uniforms
from megarl.rollout.protocol import SamplingParams


@dataclass(slots=True, eq=False)
class CompletionRequest:
    """One completion."""

    call: Call
    index: int  # among the prompt's n completions
    rid: str
    prompt: list[int]
    params: SamplingParams
    stops: tuple[int, ...]  # tokens that end it
    prompt_log_probs_from: int | None = None  # report the prompt's log-probs from this position on
    num_top: int = 0  # and so many of the most likely tokens at each of its positions
    reports: RoutedExperts | None = None  # the experts of each token, of a model with such layers
    reports_keys: IndexedKeys | None = None  # with them the keys that indexers chose, of a model that has some
    reports_from: int = 0  # the first token of the prompt whose experts are reported
    salt: str | int | None = None  # it shares KV with requests of the same salt; None: the engine gives it a number
    reports_support: bool = False  # report the tokens that could be drawn for each token, and log-probs among them
    key: int = 0
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    support: list[list[int]] = field(default_factory=list)  # of each of token_ids, if it is reported
    log_probs_in_support: list[float] = field(default_factory=list)
    prompt_log_probs: list[float] | None = None  # of tokens 1.. of the prompt, at temperature 1
    prompt_top: list[list[list[Any]]] = field(default_factory=list)  # at their positions, each [log-prob, token, None]
    versions: list[tuple[str, int]] = field(default_factory=list)  # (version, first token generated with it)
    # What layers chose for the first tokens of the sequence, in the passes that sampled what followed: [tokens, routes]
    # end to end, as KVSlots has them.  A retraction changes nothing of it.
    routes: list[Tensor] = field(default_factory=list)
    num_retractions: int = 0
    cached_tokens: int = 0  # tokens of the prompt whose KV was there when it began
    finish: dict[str, Any] | None = None

    @property
    def sequence(self) -> list[int]:
        """Prompt and tokens so far: after a retraction both are prefilled."""
        return self.prompt + self.token_ids if self.token_ids else self.prompt

    @property
    def needs_scores(self) -> bool:
        """Whether the log-probs of its prompt were asked for and are not there yet."""
        return self.prompt_log_probs_from is not None and self.prompt_log_probs is None

    @property
    def may_reuse(self) -> bool:
        """Whether it may begin with KV from the prefix cache.

        Scores need the hidden states of the whole prompt.  A request is retracted because the weights change, also
        those behind the KV of its salt.
        """
        return not self.needs_scores and not self.num_retractions

    @property
    def max_length(self) -> int:
        return len(self.prompt) + self.params.max_new_tokens

    def stamp(self, version: str, start: int) -> None:
        """Record that tokens from `start` on are generated with weights `version`."""
        if self.versions and self.versions[-1][1] == start:
            self.versions.pop()
        if not self.versions or self.versions[-1][0] != version:
            self.versions.append((version, start))

    def finish_with(self, reason: dict[str, Any]) -> None:
        assert self.finish is None, f"row {self.rid} ended twice"
        self.finish = reason
        self.call.pending -= 1


@dataclass(slots=True, eq=False)
class Call:
    """One call of /generate: complete when none of its requests is pending."""

    rows: list[CompletionRequest] = field(default_factory=list)
    pending: int = 0

    def add(self, n: int, *shared: Any, **options: Any) -> None:
        """Add n requests that differ only in their index; `shared` are the fields of a request from `rid` on."""
        self.rows += [CompletionRequest(self, index, *shared, **options) for index in range(n)]
        self.pending += n

    def set_keys(self, default_seed: int) -> None:
        """Set the random key of each request: from its own seed, or from `default_seed` and its place in the call."""
        for place, row in enumerate(self.rows):
            seed = row.params.sampling_seed
            row.key = row_key(default_seed, place) if seed is None else row_key(seed, row.index)


ABORTED = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}


_COLUMNS = {
    "length": torch.int64,  # tokens so far; the last of them is not yet in the KV cache
    "last": torch.int64,  # that token
    "num_new": torch.int64,
    "max_new": torch.int64,
    "key": torch.int64,
    "temperature": torch.float32,  # 0 = greedy
    "top_p": torch.float64,
    "top_k": torch.int64,
    "stopped": torch.bool,  # the last token ends the row
}
_TABLES = {"tokens": torch.int64, "log_probs": torch.float32, "stops": torch.int64}  # [capacity, width], width grows


class Running:
    """The requests being decoded: request i is entry i of every column; only the first `count` entries are valid.

    Columns are on the model's device.
    """

    def __init__(self, capacity: int, vocab_size: int, device: torch.device) -> None:
        self.vocab_size, self.device = vocab_size, device
        self.rows: list[CompletionRequest] = []
        self.max_length = 0  # largest possible length of all requests since the batch was last empty
        self._columns = {name: torch.zeros(capacity, dtype=dtype, device=device) for name, dtype in _COLUMNS.items()}
        for name, dtype in _TABLES.items():
            self._columns[name] = torch.full((capacity, 1), -1, dtype=dtype, device=device)

    @property
    def count(self) -> int:
        return len(self.rows)

    def column(self, name: str) -> Tensor:
        """A view of the valid entries."""
        return self._columns[name][: self.count]

    def add(self, rows: Sequence[CompletionRequest]) -> None:
        """Append requests whose sequence so far was just prefilled."""
        part = slice(self.count, self.count + len(rows))
        params = [row.params for row in rows]
        values = {
            "length": [len(row.prompt) + len(row.token_ids) for row in rows],
            "num_new": [len(row.token_ids) for row in rows],
            "max_new": [p.max_new_tokens for p in params],
            "key": [row.key for row in rows],
            "temperature": [0.0 if p.greedy else p.temperature for p in params],
            "top_p": [p.top_p for p in params],
            "top_k": [self.vocab_size if p.top_k < 0 else p.top_k for p in params],
        }
        for name, entries in values.items():
            self._columns[name][part] = torch.tensor(entries, dtype=_COLUMNS[name], device=self.device)
        width = max(p.max_new_tokens for p in params)
        self._table("tokens", width), self._table("log_probs", width)
        self._set_stops(part, [row.stops for row in rows])
        self.rows += rows
        self.max_length = max(self.max_length, *(row.max_length for row in rows))
        for place, row in enumerate(rows, start=part.start):
            if row.token_ids:
                for name, entries in (("tokens", row.token_ids), ("log_probs", row.log_probs)):
                    self._columns[name][place, : len(entries)] = torch.tensor(entries, device=self.device)

    def draw_next(self, logits: Tensor, first: int = 0) -> Tensor:
        """Sample a token for each row from `first` on from logits [R, V]; returns the places of complete rows."""
        part = {name: column[first : self.count] for name, column in self._columns.items()}
        uniform = uniforms(part["key"], part["length"])
        tokens, log_probs = draw(logits, part["temperature"], part["top_p"], part["top_k"], uniform)
        self._note_support(logits, part, tokens, first)
        each = torch.arange(len(tokens), device=self.device)
        part["tokens"][each, part["num_new"]] = tokens
        part["log_probs"][each, part["num_new"]] = log_probs
        part["last"].copy_(tokens)
        part["num_new"].add_(1)
        part["length"].add_(1)
        part["stopped"].copy_((tokens[:, None] == part["stops"]).any(1))
        return (part["stopped"] | (part["num_new"] >= part["max_new"])).nonzero()[:, 0] + first

    def _note_support(self, logits: Tensor, part: dict[str, Tensor], tokens: Tensor, first: int) -> None:
        """Of the rows from `first` on that report it; `part`: their columns."""
        rows = [row for row in self.rows[first:] if row.reports_support]
        if not rows:
            return
        at = torch.tensor([row.reports_support for row in self.rows[first:]], device=self.device)
        settings = part["temperature"][at], part["top_p"][at], part["top_k"][at]
        for row, ids, log_prob in zip(rows, *support(logits[at], *settings, tokens[at]), strict=True):
            row.support.append(ids)
            row.log_probs_in_support.append(log_prob)

    def collect(self, places: Tensor) -> list[CompletionRequest]:
        """The requests at `places`, with their tokens so far copied into them; complete ones are marked as finished."""
        columns = [self._columns[name][places].tolist() for name in ("num_new", "tokens", "log_probs", "stopped")]
        out = []
        for place, n, tokens, log_probs, stopped in zip(places.tolist(), *columns, strict=True):
            row = self.rows[place]
            row.token_ids, row.log_probs = tokens[:n], log_probs[:n]
            if stopped:
                row.finish_with({"type": "stop", "matched": tokens[n - 1]})
            elif n == row.params.max_new_tokens:
                row.finish_with({"type": "length", "length": n})
            out.append(row)
        return out

    def remove(self, places: Tensor) -> tuple[Tensor, Tensor]:
        """Remove rows; the last rows move into the gaps. Returns (source, target) of the moves, for the KV cache."""
        kept = torch.ones(self.count, dtype=torch.bool, device=self.device)
        kept[places] = False
        left = int(kept.sum())
        source, target = kept[left:].nonzero()[:, 0] + left, (~kept[:left]).nonzero()[:, 0]
        for column in self._columns.values():
            column[target] = column[source]
        for hole, moved in zip(target.tolist(), source.tolist(), strict=True):
            self.rows[hole] = self.rows[moved]
        del self.rows[left:]
        if not self.rows:
            self.max_length = 0
        return source, target

    def _set_stops(self, part: slice, stops: Sequence[tuple[int, ...]]) -> None:
        table = self._table("stops", max(len(s) for s in stops))
        width = table.shape[1]
        padded = [[*s, *[-1] * (width - len(s))] for s in stops]  # -1 is no token
        table[part] = torch.tensor(padded, dtype=_TABLES["stops"], device=self.device)

    def _table(self, name: str, width: int) -> Tensor:
        """The table, widened first if it is narrower than `width`."""
        table = self._columns[name]
        if table.shape[1] < width:
            wide = torch.full((len(table), width), -1, dtype=table.dtype, device=self.device)
            wide[:, : table.shape[1]] = table
            self._columns[name] = table = wide
        return table
