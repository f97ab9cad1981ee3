"""How a push verifies that a server holds the weights, before the server may generate again.

1. Digests: whole tensors pass through rank 0, which computes what the server must report (`check_whole_tensors`); each
   sender of slices compares the digests of its own parts (`reshard/exchange.py`).
2. Changes: where digests cannot be computed, as those of quantized weights, a server's checksums must have changed if
   and only if the weights changed, and must be those of its replicas (`contradictions`).
3. Whole tensors after slices: a receiver writes slices to the places given by a table and digests these places, so it
   cannot detect an error in the table.  The first slices sent to a server process are compared with the server's own
   loading of whole tensors (`check_slices`, `compare_slices_with_whole`).
4. A folder: a server of which only changes are known loads an exported folder (`compare_with_folder`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

from megarl.weights.mapping.blocks import HFConfig
from megarl.weights.mapping.families import tied
from megarl.weights.mapping.mtp import shared_in_draft
from megarl.weights.mapping.names import Sizes, some_names
from megarl.weights.mapping.server_map import derived_table, server_table
from megarl.weights.push.buckets import Bucket
from megarl.weights.push.report import PushError
from megarl.weights.push.servers import Server, ServerLayout
from megarl.weights.push.state import SLICES, PushState
from megarl.weights.verify.digests import RankDigests

# No weight: which of three positions turns each part of a head, by SGLang's rope of Qwen3.5.
_COMPUTED = ".rotary_emb.axis_map"
Checksums = Sequence[Mapping[str, str]]  # of the parameters of each rank of a server, by their names there


class ExpectedDigests:
    """The digests that servers of each layout must report, computed from the buckets that are sent to them."""

    def __init__(self, layouts: Iterable[ServerLayout], hf_config: HFConfig, sizes: Sizes) -> None:
        dtypes = {name: dtype for name, (_, dtype) in sizes.items()}
        # Names that a server may hold in addition -> the tensors that these must equal.
        self.tied = tied(hf_config) | shared_in_draft(hf_config)
        self._ranks = {}
        for layout in dict.fromkeys(layouts):
            table = [*server_table(layout.engine, hf_config), *derived_table(layout.engine, hf_config)]
            at = layout.coordinates
            self._ranks[layout] = [RankDigests(table, coordinate, dtypes, layout.hashes) for coordinate in at]

    def add(self, bucket: Bucket) -> None:
        for (name, raw), shape in zip(bucket.parts(), bucket.shapes, strict=True):
            tensor = raw.view(bucket.dtype).view(shape)
            for rank in (rank for ranks in self._ranks.values() for rank in ranks):
                rank.add(name, tensor)

    def result(self) -> dict[ServerLayout, Checksums]:
        """Call it after the last bucket."""
        return {layout: [rank.result() for rank in ranks] for layout, ranks in self._ranks.items()}


def check_whole_tensors(state: PushState, transports: Mapping[str, str], expected: ExpectedDigests) -> None:
    """After the last bucket: the servers that still wait and hold what was sent are done.

    `transports`: url -> transport of the servers that the buckets were sent to.
    """
    digests = expected.result()
    weights = repr(digests)
    waiting = [url for url, transport in state.waiting().items() if transports.get(url) == transport]
    plain = [url for url in waiting if state.targets[url].server.capabilities.is_plain]
    with state.clock("verify"):
        equal = state.attempt(
            lambda server: count_equal(server, digests[server.capabilities.layout], expected.tied), plain
        )
    for url, count in equal.items():
        state.targets[url].num_equal, state.targets[url].done = count, transports[url]
    others = _read_checksums(state, [url for url in waiting if url not in plain])
    for url in others:  # also one that contradicts its replicas: it is unknown which of them is right
        state.targets[url].needs_folder |= not state.targets[url].server.baseline_weights
    for url in _consistent(state, dict.fromkeys(others, weights)):
        state.targets[url].done = transports[url]
        state.targets[url].server.set_baseline(weights)


def count_equal(server: Server, expected: Checksums, tied: Mapping[str, str]) -> int:
    """Compare the digests of a server's ranks with the expected ones; the number of equal digests, or PushError."""
    held = server.read_checksums()
    if len(held) != len(expected):
        raise PushError(f"{server.url} answered for {len(held)} ranks, expected {len(expected)}")
    for rank, (ours, theirs) in enumerate(zip(expected, held, strict=True)):
        check_digests(server.url if len(expected) == 1 else f"rank {rank} of {server.url}", theirs, ours, tied)
    return sum(len(ours) for ours in expected)


def check_digests(who: str, held: Mapping[str, str], sent: Mapping[str, str], tied: Mapping[str, str]) -> None:
    """PushError unless the server holds exactly the tensors that were sent.

    `tied`: names that a server may hold in addition, if they equal the tensor that they are tied to.
    """
    differ = [name for name in sent if name in held and held[name] != sent[name]]
    missing = [name for name in sent if name not in held]
    others = (name for name in held if name not in sent and not name.endswith(_COMPUTED))
    extra = [name for name in others if held[name] != sent.get(tied.get(name, ""))]
    parts = [("differ", differ), ("missing", missing), ("never sent", extra)]
    faults = [f"{what}: {some_names(names)}" for what, names in parts if names]
    if faults:
        raise PushError(f"{who} does not hold the weights that the trainer sent ({'; '.join(faults)})")


def check_slices(state: PushState, sent: Mapping[str, str]) -> None:
    """After slices were sent: servers whose slices were compared with whole tensors before are done.

    The others, and all if the push `checks`, get whole tensors too.  `sent`: url -> a text for its slices.
    """
    held = _read_checksums(state, sent)
    for url in _consistent(state, {url: sent[url] for url in held}):
        target = state.targets[url]
        if target.server.fits_slices and not state.checks:
            target.server.set_baseline(sent[url])
        else:
            target.after_slices, target.slices_by = (sent[url], held[url]), target.transports[0]
            while target.transports[0] in SLICES:
                state.send_on(url)


def compare_slices_with_whole(state: PushState) -> None:
    """After slices and then whole tensors were sent: check which servers held the same after both."""
    for url, target in state.targets.items():
        if target.after_slices is None or not target.done:
            continue
        weights, by_slices = target.after_slices
        differ = _differing(by_slices, target.server.checksums)
        target.server.fits_slices = not differ
        if differ:
            held = f"{url} held other weights after slices than after whole tensors: {some_names(differ)}"
            state.warn(url, target.slices_by, held)
        else:
            target.done, target.is_compared = target.slices_by, True
            target.server.set_baseline(weights)


def compare_with_folder(state: PushState, urls: Collection[str], folder: str) -> None:
    """Let servers read the same weights from an exported folder; those that then hold others are dropped."""

    def compare(server: Server) -> None:
        before = server.checksums
        server.load_folder(folder, state.version)
        for rank, (held, read) in enumerate(zip(before, server.read_checksums(), strict=True)):
            if differ := _differing([held], [read]):
                where = f"rank {rank} of {server.url}"
                raise PushError(f"{where} holds other weights after reading {folder} than before: {some_names(differ)}")

    for url in state.each(compare, urls):
        state.targets[url].is_compared = True


def drop_unverified(state: PushState, reason: str) -> None:
    """Drop servers whose weights neither digests nor an exported folder have verified."""
    for url in sorted(state.left):
        if state.targets[url].needs_folder and not state.targets[url].is_compared:
            state.drop(url, f"{url} has checksums that only an exported folder could verify: {reason}")


def _differing(before: Checksums, after: Checksums) -> list[str]:
    """Names of parameters whose checksums differ."""
    pairs = zip(before, after, strict=True)
    return [name for one, other in pairs for name in {**one, **other} if one.get(name) != other.get(name)]


def _read_checksums(state: PushState, urls: Iterable[str]) -> dict[str, list[dict[str, str]]]:
    """url -> checksums of its ranks, of servers for which they are not computed here."""
    with state.clock("verify"):
        return state.attempt(Server.read_checksums, urls)


def _consistent(state: PushState, weights: Mapping[str, str]) -> list[str]:
    """Servers whose checksums do not contradict what they got (`contradictions`); the others fall back."""
    faults = contradictions([state.targets[url].server for url in weights], weights)
    for url, reason in faults.items():
        state.fall_back(url, reason)
    return [url for url in weights if url not in faults]


def contradictions(servers: Sequence[Server], weights: Mapping[str, str]) -> dict[str, str]:
    """url -> reason, for servers whose checksums contradict the weights that they got.

    Since the last good push their checksums must have changed if and only if the trainer's `weights` changed (for each
    url a text that identifies the weights).  They must be the same on all servers of one layout.
    """
    faults: dict[str, str] = {}
    replicas: dict[ServerLayout, list[Server]] = defaultdict(list)
    for server in servers:
        url = server.url
        replicas[server.capabilities.layout].append(server)
        changed, held_changed = weights[url] != server.baseline_weights, server.checksums != server.baseline
        if server.baseline_weights and changed != held_changed:
            what = "the weights changed" if changed else "the weights are those of the last push"
            faults[url] = f"{url}: {what}, and its checksums {'did' if held_changed else 'did not'}"
    for same in replicas.values():
        if any(server.checksums != same[0].checksums for server in same):
            faults |= {server.url: f"{server.url} and its replicas answer with different checksums" for server in same}
    return faults
