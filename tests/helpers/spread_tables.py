"""Tables of made-up models for the tests of plans: the trainer's parameters, and the same model in a server's."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.weights.mapping.names import QKV, GateUp, Op, Rename, Vocab
from megarl.weights.mapping.sglang_ops import StackedExperts, StackedQKV, StackedRows, StackedVocab

Table = tuple[Op, ...]


@dataclass(frozen=True)
class Model:
    """A decoder with grouped-query attention; experts in every layer but the first if `num_experts`."""

    num_layers: int = 4
    hidden: int = 8
    num_heads: int = 8
    num_groups: int = 4
    head_dim: int = 2
    ffn: int = 16
    vocab_size: int = 37
    num_experts: int = 0
    expert_ffn: int = 8
    is_tied: bool = False

    def has_experts(self, layer: int) -> bool:
        return self.num_experts > 0 and layer > 0

    def trainer_table(self) -> Table:
        copies = ("output_layer.weight",) if self.is_tied else ()
        ops: list[Op] = [
            Vocab(
                "embedding.word_embeddings.weight", "model.embed_tokens.weight", self.vocab_size, self.hidden, 4,
                copies=copies,
            )
        ]  # fmt: skip
        for i in range(self.num_layers):
            ops += self._trainer_layer(i)
        ops.append(Rename("decoder.final_layernorm.weight", "model.norm.weight", (self.hidden,)))
        if not self.is_tied:
            ops.append(Vocab("output_layer.weight", "lm_head.weight", self.vocab_size, self.hidden, 4))
        return tuple(ops)

    def _trainer_layer(self, i: int) -> list[Op]:
        mg, hf = f"decoder.layers.{i}", f"model.layers.{i}"
        sizes = (self.num_heads, self.num_groups, self.head_dim)
        q, k, v = (f"{hf}.self_attn.{x}_proj" for x in "qkv")
        qkv = f"{mg}.self_attention.linear_qkv"
        ops: list[Op] = [
            Rename(f"{mg}.input_layernorm.weight", f"{hf}.input_layernorm.weight", (self.hidden,)),
            QKV(f"{qkv}.weight", f"{q}.weight", f"{k}.weight", f"{v}.weight", *sizes, self.hidden),
            QKV(f"{qkv}.bias", f"{q}.bias", f"{k}.bias", f"{v}.bias", *sizes, None),
            Rename(f"{mg}.self_attention.linear_proj.weight", f"{hf}.self_attn.o_proj.weight", self._o_shape, 1),
        ]
        if not self.has_experts(i):
            gate, up, down = (f"{hf}.mlp.{x}_proj.weight" for x in ("gate", "up", "down"))
            ops.append(GateUp(f"{mg}.mlp.linear_fc1.weight", gate, up, self.ffn, self.hidden))
            ops.append(Rename(f"{mg}.mlp.linear_fc2.weight", down, (self.hidden, self.ffn), 1))
            return ops
        ops.append(Rename(f"{mg}.mlp.router.weight", f"{hf}.mlp.gate.weight", (self.num_experts, self.hidden)))
        for n in range(self.num_experts):
            gate, up, down = (f"{hf}.mlp.experts.{n}.{x}_proj.weight" for x in ("gate", "up", "down"))
            expert, local = (n, self.num_experts), f"{mg}.mlp.experts.local_experts.{n}"
            ops.append(
                GateUp(f"{local}.linear_fc1.weight", gate, up, self.expert_ffn, self.hidden, axis="etp", expert=expert)
            )
            shape = (self.hidden, self.expert_ffn)
            ops.append(Rename(f"{local}.linear_fc2.weight", down, shape, 1, axis="etp", expert=expert))
        return ops

    def server_table(self) -> Table:
        """As SGLang fuses them."""
        ops: list[Op] = [
            StackedVocab("model.embed_tokens.weight", "model.embed_tokens.weight", self.vocab_size, self.hidden)
        ]
        for i in range(self.num_layers):
            ops += self._server_layer(i)
        ops.append(Rename("model.norm.weight", "model.norm.weight", (self.hidden,)))
        if not self.is_tied:
            ops.append(StackedVocab("lm_head.weight", "lm_head.weight", self.vocab_size, self.hidden))
        return tuple(ops)

    def _server_layer(self, i: int) -> list[Op]:
        hf = f"model.layers.{i}"
        sizes = (self.num_heads, self.num_groups, self.head_dim)
        q, k, v = (f"{hf}.self_attn.{x}_proj" for x in "qkv")
        norm, o_proj = f"{hf}.input_layernorm.weight", f"{hf}.self_attn.o_proj.weight"
        ops: list[Op] = [
            Rename(norm, norm, (self.hidden,)),
            StackedQKV(f"{hf}.qkv.weight", f"{q}.weight", f"{k}.weight", f"{v}.weight", *sizes, self.hidden),
            StackedQKV(f"{hf}.qkv.bias", f"{q}.bias", f"{k}.bias", f"{v}.bias", *sizes, None),
            Rename(o_proj, o_proj, self._o_shape, 1),
        ]
        if not self.has_experts(i):
            gate, up, down = (f"{hf}.mlp.{x}_proj.weight" for x in ("gate", "up", "down"))
            parts = ((gate, self.ffn), (up, self.ffn))
            ops.append(StackedRows(f"{hf}.mlp.gate_up_proj.weight", parts, self.hidden))
            ops.append(Rename(down, down, (self.hidden, self.ffn), 1))
            return ops
        router, experts = f"{hf}.mlp.gate.weight", f"{hf}.mlp.experts"
        gate, up, down = (f"{experts}.{{}}.{x}_proj.weight" for x in ("gate", "up", "down"))
        wide, tall = (self.expert_ffn, self.hidden), (self.hidden, self.expert_ffn)
        ops.append(Rename(router, router, (self.num_experts, self.hidden)))
        ops.append(StackedExperts(f"{experts}.w13_weight", (gate, up), self.num_experts, wide, 0))
        ops.append(StackedExperts(f"{experts}.w2_weight", (down,), self.num_experts, tall, 1))
        return ops

    def plain_table(self) -> Table:
        """HF tensors as they are, whole on every rank."""
        shapes = {name: shape for op in self.trainer_table() for name, shape in op.hf_shapes.items()}
        return tuple(Rename(name, name, shape) for name, shape in shapes.items())

    @property
    def _o_shape(self) -> tuple[int, int]:
        return (self.hidden, self.num_heads * self.head_dim)


@dataclass(frozen=True)
class LatentModel:
    """A decoder of DeepSeek-V3's shape; the numbers are those of a model with 1.04 * 10^12 parameters."""

    num_layers: int = 61
    num_dense: int = 1
    hidden: int = 7168
    num_heads: int = 64
    q_rank: int = 1536
    kv_rank: int = 512
    nope: int = 128
    rope: int = 64
    ffn: int = 18432
    num_experts: int = 384
    expert_ffn: int = 2048
    vocab_size: int = 163840

    def trainer_table(self) -> Table:
        mg = "decoder.layers.{}."
        ops: list[Op] = [
            Vocab("embedding.word_embeddings.weight", "model.embed_tokens.weight", self.vocab_size, self.hidden)
        ]
        for i in range(self.num_layers):
            at, hf = mg.format(i), f"model.layers.{i}."
            ops += [Rename(at + name, hf + name, shape, dim) for name, shape, dim in self._plain()]
            if i < self.num_dense:
                gate, up, down = (f"{hf}mlp.{x}_proj.weight" for x in ("gate", "up", "down"))
                ops.append(GateUp(at + "mlp.linear_fc1.weight", gate, up, self.ffn, self.hidden))
                ops.append(Rename(at + "mlp.linear_fc2.weight", down, (self.hidden, self.ffn), 1))
                continue
            ops += [Rename(at + name, hf + name, shape, dim) for name, shape, dim in self._routers()]
            for n in range(self.num_experts):
                gate, up, down = (f"{hf}mlp.experts.{n}.{x}_proj.weight" for x in ("gate", "up", "down"))
                local, expert = f"{at}mlp.experts.local_experts.{n}.", (n, self.num_experts)
                ops.append(
                    GateUp(
                        local + "linear_fc1.weight", gate, up, self.expert_ffn, self.hidden, axis="etp", expert=expert
                    )
                )
                shape = (self.hidden, self.expert_ffn)
                ops.append(Rename(local + "linear_fc2.weight", down, shape, 1, axis="etp", expert=expert))
        ops.append(Rename("decoder.final_layernorm.weight", "model.norm.weight", (self.hidden,)))
        ops.append(Vocab("output_layer.weight", "lm_head.weight", self.vocab_size, self.hidden))
        return tuple(ops)

    def server_table(self) -> Table:
        ops: list[Op] = [
            StackedVocab("model.embed_tokens.weight", "model.embed_tokens.weight", self.vocab_size, self.hidden)
        ]
        for i in range(self.num_layers):
            hf = f"model.layers.{i}."
            ops += self._server_attention(hf)
            if i < self.num_dense:
                gate, up, down = (f"{hf}mlp.{x}_proj.weight" for x in ("gate", "up", "down"))
                ops.append(GateUp(hf + "mlp.gate_up_proj.weight", gate, up, self.ffn, self.hidden))
                ops.append(Rename(down, down, (self.hidden, self.ffn), 1))
                continue
            ops += [Rename(hf + name, hf + name, shape, dim) for name, shape, dim in self._routers()]
            experts = f"{hf}mlp.experts."
            gate, up, down = (f"{experts}{{}}.{x}_proj.weight" for x in ("gate", "up", "down"))
            wide, tall = (self.expert_ffn, self.hidden), (self.hidden, self.expert_ffn)
            ops.append(StackedExperts(experts + "w13_weight", (gate, up), self.num_experts, wide, 0))
            ops.append(StackedExperts(experts + "w2_weight", (down,), self.num_experts, tall, 1))
        ops.append(Rename("model.norm.weight", "model.norm.weight", (self.hidden,)))
        ops.append(StackedVocab("lm_head.weight", "lm_head.weight", self.vocab_size, self.hidden))
        return tuple(ops)

    def _plain(self) -> list[tuple[str, tuple[int, ...], int | None]]:
        heads, attn = self.num_heads, "self_attn."
        return [
            ("input_layernorm.weight", (self.hidden,), None),
            ("post_attention_layernorm.weight", (self.hidden,), None),
            (attn + "q_a_proj.weight", (self.q_rank, self.hidden), None),
            (attn + "q_a_layernorm.weight", (self.q_rank,), None),
            (attn + "q_b_proj.weight", (heads * (self.nope + self.rope), self.q_rank), 0),
            (attn + "kv_a_proj_with_mqa.weight", (self.kv_rank + self.rope, self.hidden), None),
            (attn + "kv_a_layernorm.weight", (self.kv_rank,), None),
            (attn + "kv_b_proj.weight", (heads * 2 * self.nope, self.kv_rank), 0),
            (attn + "o_proj.weight", (self.hidden, heads * self.nope), 1),
        ]

    def _routers(self) -> list[tuple[str, tuple[int, ...], int | None]]:
        shared, ffn = "mlp.shared_experts.", self.expert_ffn
        return [
            ("mlp.gate.weight", (self.num_experts, self.hidden), None),
            ("mlp.gate.e_score_correction_bias", (self.num_experts,), None),
            (shared + "gate_proj.weight", (ffn, self.hidden), 0),
            (shared + "up_proj.weight", (ffn, self.hidden), 0),
            (shared + "down_proj.weight", (self.hidden, ffn), 1),
        ]

    def _server_attention(self, hf: str) -> list[Op]:
        both = ("self_attn.q_a_proj.weight", "self_attn.kv_a_proj_with_mqa.weight")
        shapes = {name: shape for name, shape, _ in self._plain()}
        parts = tuple((hf + name, shapes[name][0]) for name in both)
        fused = StackedRows(hf + "self_attn.fused_qkv_a_proj_with_mqa.weight", parts, self.hidden, False)
        rest = [Rename(hf + name, hf + name, shape, dim) for name, shape, dim in self._plain() if name not in both]
        return [fused, *rest]
