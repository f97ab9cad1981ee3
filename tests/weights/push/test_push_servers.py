import pytest

from megarl.weights.mapping.names import ShardCoordinate
from megarl.weights.push.report import PushError
from megarl.weights.push.servers import RECEIVER, Nature, check_digests

SENT = {"embed": "1", "norm": "2"}


def test_equal_digests_pass() -> None:
    check_digests("http://a", dict(SENT), SENT, {})


def test_tensors_that_differ_are_missing_or_were_never_sent_are_named_with_their_server() -> None:
    with pytest.raises(PushError, match=r"^http://a does not hold the weights that the trainer sent \(differ: norm\)$"):
        check_digests("http://a", {"embed": "1", "norm": "3"}, SENT, {})
    with pytest.raises(PushError, match=r"missing: embed; never sent: bias"):
        check_digests("http://a", {"norm": "2", "bias": "4"}, SENT, {})


def test_a_tied_tensor_may_be_listed_twice_when_it_is_the_same() -> None:
    tied = {"head": "embed"}
    check_digests("http://a", SENT | {"head": "1"}, SENT, tied)
    with pytest.raises(PushError, match="never sent: head"):
        check_digests("http://a", SENT | {"head": "2"}, SENT, tied)


CONFIG = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64}
ON_GPU = {"version": "0.5.23", "tp_size": 2, "device": "cuda", "base_gpu_id": 4, "startup_time": {"s": 1.5}}


def test_what_a_server_says_of_itself() -> None:
    nature = Nature.read(ON_GPU | {"custom_weight_loader": [RECEIVER]}, CONFIG)
    assert (nature.engine, len(nature.coordinates), nature.hashes, nature.first_gpu) == ("sglang", 2, "words", 4)
    assert nature.is_plain and nature.has_receiver and nature.started == '{"s": 1.5}'
    ours = Nature.read({"version": "megarl-hf", "device": "cpu"}, CONFIG)
    assert (ours.engine, ours.coordinates, ours.hashes, ours.first_gpu) == ("hf", (ShardCoordinate(),), "sha256", None)
    assert ours.is_plain and not ours.has_receiver
    ours = Nature.read({"version": "megarl-hf", "device": "cuda", "base_gpu_id": 3}, CONFIG)
    assert (ours.engine, ours.hashes, ours.first_gpu, ours.is_plain) == ("hf", "words", 3, True)


def test_attention_groups_are_read_from_the_server() -> None:
    groups = {"tp_size": 4, "ep_size": 2, "attn_dp_size": 2, "dp_size": 1, "enable_dp_lm_head": True}
    nature = Nature.read(ON_GPU | groups | {"moe_a2a_backend": "none", "moe_dense_tp_size": None}, CONFIG)
    assert nature.is_plain
    assert [(c.attn_rank, c.attn, c.ep_rank) for c in nature.coordinates] == [
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
        {"attn_dp_size": 2},  # without enable_dp_lm_head the head is cut over all ranks
        {"device": "cpu", "tp_size": 4},
    ],
)
def test_servers_that_hold_tensors_in_a_way_of_their_own_are_told_apart(change: dict[str, object]) -> None:
    assert not Nature.read(ON_GPU | change, CONFIG).is_plain
