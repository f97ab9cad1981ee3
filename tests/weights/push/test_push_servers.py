"""What the trainer knows of servers: capabilities, digests, and GPUs; and what its ranks agree on before slices."""

from types import SimpleNamespace
from typing import Any

import pytest

from megarl.arch.sglang_config import overrides
from megarl.arch.sglang_options import TRIED
from megarl.rollout.client import ServerClient
from megarl.servers.launch import WEIGHT_LOADER
from megarl.weights.push import push
from megarl.weights.push.checks import check_digests
from megarl.weights.push.gpu_handles import gpus_of, take, wanted_handles
from megarl.weights.push.report import PushError
from megarl.weights.push.routes import Claim, members_of, message_bytes_of
from megarl.weights.push.servers import Server, ServerCapabilities
from megarl.weights.push.settings import PushSettings

SENT = {"embed": "1", "norm": "2"}


def test_tensors_that_differ_are_missing_or_were_never_sent_are_named_with_their_server() -> None:
    with pytest.raises(PushError, match=r"^http://a does not hold the weights that the trainer sent \(differ: norm\)$"):
        check_digests("http://a", {"embed": "1", "norm": "3"}, SENT, {})
    with pytest.raises(PushError, match=r"missing: embed; never sent: bias"):
        check_digests("http://a", {"norm": "2", "bias": "4"}, SENT, {})


def test_a_tied_tensor_may_be_listed_twice_when_it_is_the_same() -> None:
    tied = {"head": "embed"}
    for held in (SENT, SENT | {"head": "1"}):
        check_digests("http://a", held, SENT, tied)
    with pytest.raises(PushError, match="never sent: head"):
        check_digests("http://a", SENT | {"head": "2"}, SENT, tied)


CONFIG = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64}
TOLD = {field: option.tried[0] for field, option in TRIED.items()}
ON_GPU = TOLD | {"version": "0.5.23", "tp_size": 2, "device": "cuda", "base_gpu_id": 4, "startup_time": {"s": 1.5}}


def test_what_a_server_says_of_itself() -> None:
    able = ServerCapabilities.read(ON_GPU | {"custom_weight_loader": [WEIGHT_LOADER]}, CONFIG)
    assert (able.layout, able.first_gpu) == (("sglang", 2, 1, 1, "words"), 4)
    assert able.is_plain and able.has_receiver and able.started == '{"s": 1.5}'
    ours = ServerCapabilities.read({"version": "megarl-hf", "device": "cpu"}, CONFIG)
    assert (ours.layout, ours.first_gpu) == (("hf", 1, 1, 1, "sha256"), None)
    assert ours.is_plain and not ours.has_receiver
    ours = ServerCapabilities.read({"version": "megarl-hf", "device": "cuda", "base_gpu_id": 3}, CONFIG)
    assert (ours.layout.hashes, ours.first_gpu, ours.is_plain) == ("words", 3, True)


def test_attention_groups_are_read_from_the_server() -> None:
    groups = {"tp_size": 4, "ep_size": 2, "attn_dp_size": 2, "dp_size": 1, "enable_dp_lm_head": True}
    able = ServerCapabilities.read(ON_GPU | groups | {"moe_a2a_backend": "none", "moe_dense_tp_size": None}, CONFIG)
    assert able.is_plain
    assert [(c.attn_rank, c.attn, c.ep_rank) for c in able.layout.coordinates] == [
        (0, 2, 0), (1, 2, 0), (0, 2, 1), (1, 2, 1),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        {"quantization": "fp8"},
        {"pp_size": 2},
        {"dp_size": 2},
        {"moe_dp_size": 2},
        {"attn_cp_size": 2},
        {"moe_dense_tp_size": 1},
        {"moe_a2a_backend": "deepep"},
        {"moe_runner_backend": "flashinfer_trtllm"},
        {"speculative_algorithm": "EAGLE3"},
        {"enable_eplb": True},
        {"attn_dp_size": 2},  # without enable_dp_lm_head the head is cut over all ranks
        {"device": "cpu", "tp_size": 4},
    ],
)
def test_servers_that_hold_tensors_in_a_way_of_their_own_are_told_apart(change: dict[str, object]) -> None:
    assert not ServerCapabilities.read(ON_GPU | change, CONFIG).is_plain


def test_a_server_that_was_told_another_model_than_the_trainers_is_refused() -> None:
    """Of rope no weight says anything, so no push would notice it."""
    hf = CONFIG | {"layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2}
    hf |= {"rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.25}}
    told = {"json_model_override_args": overrides(hf)}
    assert ServerCapabilities.read(ON_GPU | told, hf).is_plain
    other = {"json_model_override_args": overrides(hf).replace("10000000.0", "1.0")}
    with pytest.raises(ValueError, match=r'^json_model_override_args=\{.*"rope_theta": 1.0.*: expected \{.*10000000.0'):
        ServerCapabilities.read(ON_GPU | other, hf)


def test_a_server_that_fuses_shared_experts_or_does_not_say_what_it_does_is_told_apart() -> None:
    shared, unsaid = {**CONFIG, "n_shared_experts": 1}, {key: ON_GPU[key] for key in ON_GPU if key != "pp_size"}
    fusion = [
        ServerCapabilities.read(ON_GPU | {"disable_shared_experts_fusion": off}, shared).is_plain
        for off in (True, False)
    ]
    assert fusion == [True, False] and not ServerCapabilities.read(unsaid, CONFIG).is_plain


def test_a_server_is_paused_before_an_update_of_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that gets broadcasts, and so joins a group: that begins with a greeting in an update."""
    calls: list[str] = []

    class Noting(Server):
        def probe(self) -> None:
            self.capabilities = ServerCapabilities.read(
                TOLD | {"version": "0.5.23", "custom_weight_loader": [WEIGHT_LOADER]}, CONFIG
            )

        def open(self) -> None:
            calls.append("open")

        def join(self, backend: str) -> None:
            calls.append("join")

    monkeypatch.setattr(push, "Server", Noting)
    monkeypatch.setattr(ServerClient, "pause", lambda client, mode: calls.append("pause"))
    monkeypatch.setattr(push, "ranks_of_copy", lambda: 1)
    url = "http://127.0.0.1:9"
    state = push.Pusher(PushSettings((url,), "token", transport="gathered"), CONFIG)._begin([url], 1)
    assert state.waiting() == {url: "gathered"} and calls == ["pause", "open"]


# gpu_handles: on which GPUs the ranks of servers stand, and whose handles they are given
def server(*gpus: str, first_gpu: int | None = 0) -> Any:
    return SimpleNamespace(
        url="http://a", gpus=gpus, capabilities=SimpleNamespace(first_gpu=first_gpu, layout=SimpleNamespace(tp=2))
    )


def test_a_server_stands_where_it_was_said_to_stand_or_else_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "here")
    assert gpus_of(server("1/0", "1/1")) == ["1/0", "1/1"]
    assert gpus_of(server("1/0", "1/1", first_gpu=None)) == [], "it has no GPU"
    assert gpus_of(server(first_gpu=4)) == ["here/4", "here/5"]


def test_each_rank_is_given_a_handle_of_its_own_gpu_on_its_own_machine() -> None:
    first, second, over_both = server("0/0", "0/1"), server("1/0", "1/1"), server("0/1", "1/0")
    assert wanted_handles([first, second, over_both]) == {"0/0": 1, "0/1": 2, "1/0": 2, "1/1": 1}
    handles = {"0/0": ["a"], "0/1": ["b", "c"], "1/0": ["d", "e"], "1/1": ["f"]}
    assert take(handles, first) == ["a", "c"]
    assert take(handles, second) == ["e", "f"]
    assert take(handles, over_both) == ["b", "d"]
    with pytest.raises(ValueError, match="no rank of the trainer uses 0/0, where http://a has a rank"):
        take(handles, first)


# routes: what the ranks settle; the sending itself is in tests/dist/test_push.py


MB = 1 << 20


def test_rank_0_and_those_that_send_meet_the_server() -> None:
    claims = [Claim("", "f", sends, {}) for sends in (False, True, False, True)]
    assert members_of(claims) == {0: 0, 1: 1, 3: 2}


@pytest.mark.parametrize(
    ("odd", "sentence"),
    [
        (Claim("no such layer", "", False, {}), "^no such layer$"),
        (Claim("", "g", False, {}), "rank 2 of the trainer describes"),
        (Claim("", "f", True, {"NCCL_NET": "IB"}), "NCCL_NET: rank 2 of the trainer has IB and rank 0 none, with"),
    ],
)
def test_nobody_sends_where_one_rank_cannot_or_has_another_plan(odd: Claim, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        members_of([Claim("", "f", True, {}), Claim("", "f", True, {}), odd])


@pytest.mark.parametrize(("bucket_mb", "message_mb"), [(1, 0.5), (64, 32), (128, 64), (1024, 64)])
def test_two_messages_take_these_bytes_until_larger_ones_gain_nothing(bucket_mb: int, message_mb: float) -> None:
    assert message_bytes_of(bucket_mb * MB) == message_mb * MB
