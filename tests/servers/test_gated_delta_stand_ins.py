"""The gated delta net that a server without GPU computes: states that pieces of sequences leave and continue."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

import megarl
from megarl.mcore.models.hybrid.delta_kernels import causal_conv1d, chunk_gated_delta_rule, l2norm

FILE = Path(megarl.__file__).parent / "servers" / "sglang_cpu" / "sgl_kernel" / "mamba.py"
LENGTHS, SLOTS = (70, 3, 131), torch.tensor([4, 0, 2])  # of a pool of five
CUTS = ((0, 64), (64, 65), (65, 129), (129, 130), (130, 131))  # of every sequence, as far as it goes
KEYS, VALUES, KEY, VALUE, TAPS = 2, 4, 6, 5, 4


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mamba_of_a_server", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("decodes", [False, True], ids=["pieces", "pieces and single tokens"])
def test_a_sequence_in_pieces_is_the_sequence(kernels: ModuleType, decodes: bool) -> None:
    """Against the trainer's kernels, which compute whole rows in chunks.  float32 rounds to 6e-8 of numbers about 1."""
    torch.manual_seed(0)
    ends = torch.tensor([0, *LENGTHS]).cumsum(0)
    width, total = 2 * KEYS * KEY + VALUES * VALUE, int(ends[-1])
    qkv, weight, a, b = (torch.randn(n) for n in ((total, width), (width, TAPS), (total, VALUES), (total, VALUES)))
    a_log, dt_bias = torch.randn(VALUES), torch.randn(VALUES)

    def heads(mixed: torch.Tensor) -> list[torch.Tensor]:
        parts = mixed[None].split((KEYS * KEY, KEYS * KEY, VALUES * VALUE), -1)
        return [x.unflatten(-1, (n, -1)) for x, n in zip(parts, (KEYS, KEYS, VALUES), strict=True)]

    q, k, v = heads(causal_conv1d(qkv[None], weight, cu_seqlens=ends, activation="silu")[0][0])
    g, beta = -a_log.exp() * F.softplus(a + dt_bias), b.sigmoid()
    q, k = (l2norm(x).repeat_interleave(VALUES // KEYS, 2) for x in (q, k))
    wanted = chunk_gated_delta_rule(q, k, v, g=g[None], beta=beta[None], cu_seqlens=ends)[0][0]

    inputs, states = torch.randn(5, width, TAPS - 1), torch.zeros(5, VALUES, VALUE, KEY)
    untouched = inputs.clone()
    for first, last in CUTS:
        own = [n for n, length in enumerate(LENGTHS) if length > first]
        at = [torch.arange(int(ends[n]) + first, int(ends[n]) + min(last, LENGTHS[n])) for n in own]
        places = torch.tensor([0, *map(len, at)]).cumsum(0).int()
        at, slots = torch.cat(at), SLOTS[own].int()
        single = decodes and last - first == 1
        how = {"cu_seqlens": places, "initial_state_indices": slots, "use_qk_l2norm_in_kernel": True}
        if single:
            mixed = kernels.causal_conv1d_update_cpu(qkv[at], inputs, weight, None, "silu", conv_state_indices=slots)
            q, k, v = heads(mixed)
            gates = {"A_log": a_log, "dt_bias": dt_bias, "a": a[at], "b": b[at]}
            how |= {"softplus_beta": 1.0, "softplus_threshold": 20.0, "initial_state_source": states}
            out = kernels.fused_sigmoid_gating_delta_rule_update_cpu(q=q, k=k, v=v, **gates, **how)
        else:
            mixed = kernels.causal_conv1d_fn_cpu(
                qkv[at].T,
                weight,
                None,
                activation="silu",
                conv_states=inputs,
                has_initial_state=torch.full((len(own),), first > 0),
                cache_indices=slots,
                query_start_loc=places,
                seq_lens_cpu=None,
            ).T
            q, k, v = heads(mixed)
            log, taken = kernels.fused_gdn_gating_cpu(a_log, a[at], b[at], dt_bias)
            how |= {"head_first": False, "initial_state": states}
            out = kernels.chunk_gated_delta_rule_cpu(q=q, k=k, v=v, g=log, beta=taken, **how)[0]
        assert (out[0] - wanted[at]).abs().max() < 1e-5
    for slot in (1, 3):
        assert torch.equal(inputs[slot], untouched[slot]) and not states[slot].any(), "another sequence's"


def test_a_gate_need_not_be_contiguous(kernels: ModuleType) -> None:
    """Of one row and of several: queries and gates of a head are neighbours in what the projection gives."""
    for rows in (1, 3):
        both, k = torch.randn(rows, 2 * 4 * 8), torch.randn(rows, 2 * 8)
        q_weight, k_weight = torch.randn(8), torch.randn(8)
        q, gate = both.view(rows, 4, 16).chunk(2, -1)
        found = kernels.fused_qk_gemma_rmsnorm_with_gate_cpu(both, k, q_weight, k_weight, 1e-6, 8, 4)
        for x, weight, out in ((q, q_weight, found[0]), (k.view(rows, 2, 8), k_weight, found[1])):
            assert torch.allclose(out.view(x.shape), F.rms_norm(x, (8,), 1 + weight, 1e-6), atol=1e-6)
        assert torch.equal(found[2].view(rows, -1), gate.flatten(1)), "SGLang views it so"
        x = torch.randn(rows, 32)
        wanted = x * gate.reshape(rows, 32).sigmoid()
        kernels.fused_sigmoid_mul_cpu(x, gate)
        assert torch.allclose(x, wanted)
