"""Models for the tests of plans: the trainer's parameters, and the same model in a server's."""

from dataclasses import dataclass
from typing import Any

from preset_files import hf_of

from megarl.weights.mapping.families import table_for
from megarl.weights.mapping.names import Op
from megarl.weights.mapping.server_map import server_table

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
    is_tied: bool = False

    @property
    def config(self) -> dict[str, Any]:
        config = {
            "model_type": "qwen3_moe" if self.num_experts else "qwen2",
            "num_hidden_layers": self.num_layers,
            "hidden_size": self.hidden,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_groups,
            "head_dim": self.head_dim,
            "intermediate_size": self.ffn,
            "vocab_size": self.vocab_size,
            "tie_word_embeddings": self.is_tied,
        }
        experts = {"num_experts": self.num_experts, "moe_intermediate_size": 8, "mlp_only_layers": [0]}
        return config | (experts if self.num_experts else {})

    def trainer_table(self) -> Table:
        return tuple(table_for(self.config, vocab_multiple=4))

    def server_table(self) -> Table:
        """As SGLang fuses them."""
        return tuple(server_table("sglang", self.config))

    def plain_table(self) -> Table:
        """HF tensors as they are, whole on every rank."""
        return tuple(server_table("hf", self.config))


class LatentModel(Model):
    """A decoder of DeepSeek-V3's shape with 1.03 * 10^12 parameters."""

    @property
    def config(self) -> dict[str, Any]:
        return hf_of("kimi_k2_1t")
