"""A language model from an HF folder: its two forward passes, its named weights, its digests.

It uses transformers' modelling code, so that it is a check of the weights that shares no code with the trainer.
Supported are models whose layers all use full causal attention or the same sliding window, and whose logits are the
output embedding of the last hidden state (Llama, Mistral, Qwen2, Qwen3, Mixtral, DeepSeek-V3, GLM-4.5, MiniMax-M2 and
their relatives), and gpt-oss, only some of whose layers have a window.  Models whose layers have a state instead of
keys and values (Qwen3-Next, Qwen3.5, Nemotron-H), or an indexer that chooses keys (DeepSeek-V3.2, GLM-5), are served
without a cache: each pass computes whole sequences again, which is slow.  Other models are refused at the start.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from megarl.arch.hf_config import read_config, read_hf_config
from megarl.arch.routed_experts import IndexedKeys, RoutedExperts
from megarl.hf_server import device as devices
from megarl.hf_server.hub_names import hub_tensors
from megarl.hf_server.kv_cache import Decode, KVSlots, Prefill
from megarl.rollout.protocol import DTYPE_NAMES
from megarl.weights.hf.folder import HFFolder, check_finite
from megarl.weights.hf.named import misfit, open_for
from megarl.weights.mapping.families import FAMILIES, ignorable, table_for
from megarl.weights.verify.digests import Kind, digest

_DEFAULT_CACHE_BYTES = 2 << 30
_WITH_SINKS = ("gpt_oss",)  # families that transformers has no sdpa for; some of their layers have a window
_KINDS = {"full_attention", "sliding_attention"}
_MOST_RECOMPUTED = 1 << 14  # tokens of a pass over whole sequences
# Kinds of layers that keep a state in place of keys and values, or an indexer's keys beside them.
_WITHOUT_CACHE = {"linear_attention", "indexed_attention"}
_OF_EACH_TOKEN = {"mlp", "moe"}  # kinds of layers that are feed-forwards alone


class Chosen:
    """Notes what layers of a model choose, experts and keys of indexers, by hooks on transformers' modelling code.

    Example: chosen = Chosen(model.base_model, of, None); chosen.begin(); model(...); chosen.take((1, 7))  # [1, 7, R]

    In all families a layer calls `experts(hidden, indices [T, K], weights [T, K])`, for all tokens of a pass at once,
    and `indexer(...)` returns the positions of keys [S, tokens, K], those after the token itself where it has fewer.
    """

    def __init__(self, body: nn.Module, of: RoutedExperts, keys: IndexedKeys | None) -> None:
        self._experts: list[Tensor] = []
        self._keys: list[Tensor] = []
        self._most_keys = keys.chosen if keys else 0
        for name, layers, note in (
            ("experts", of.layers, self._note_experts),
            ("indexer", keys.layers if keys else (), self._note_keys),
        ):
            children = (getattr(module, name, None) for module in body.modules())
            found = [child for child in children if isinstance(child, nn.Module)]
            assert len(found) == len(layers), f"{len(found)} layers have {name}, by config.json {len(layers)}"
            for child in found:
                child.register_forward_hook(note)

    def _note_experts(self, _: nn.Module, given: tuple[Any, ...], __: Any) -> None:
        self._experts.append(given[1])

    def _note_keys(self, _: nn.Module, __: Any, keys: Tensor) -> None:
        at = torch.arange(keys.size(1), device=keys.device)[:, None]
        narrow = F.pad(keys, (0, self._most_keys - keys.size(-1)))  # of a pass over fewer tokens
        self._keys.append(narrow.masked_fill(narrow > at, 0))

    def begin(self) -> None:
        """Forget what another pass chose."""
        self._experts.clear()
        self._keys.clear()

    def take(self, shape: Sequence[int]) -> Tensor:
        """[S, tokens, routes] int64 of a pass over `shape` tokens: experts of all layers, then keys."""
        experts = torch.stack(self._experts, dim=1).flatten(1).unflatten(0, tuple(shape))
        return torch.cat([experts, *self._keys], dim=-1)


class HFModel:
    """Example: model = HFModel("/models/tiny", torch.float32); model.vocab_size, model.eos_ids."""

    def __init__(
        self, folder: str, dtype: torch.dtype, device: torch.device | str = "cpu", *, returns_routes: bool = False
    ) -> None:
        """`device`: cpu, or a GPU with its number, as cuda:0.  `returns_routes`: note the experts of every token."""
        transformers_logging.disable_progress_bar()
        self.folder = folder
        self.dtype = dtype
        self.device = torch.device(device)
        self._numbers, config = read_hf_config(folder), read_config(folder)
        if getattr(config, "quantization_config", None):
            raise ValueError(
                f"{folder}: the hf engine serves no quantized weights; expected a folder that "
                f"`megarl convert from={folder} to=FOLDER format=hf` wrote"
            )
        attention = "eager" if config.model_type in _WITH_SINKS else "sdpa"
        with open_for(folder, self._numbers) as held:  # refuses folders that transformers and the trainer read apart
            self._model = AutoModelForCausalLM.from_pretrained(
                folder, config=config, dtype=dtype, attn_implementation=attention, local_files_only=True
            )
            self._model.eval().requires_grad_(False).to(self.device)
            _unlimit_steps(self._model)
            self.config = self._model.config
            self.weights = self._named_weights(held)
            self._correct(held)
        self._body = self._model.base_model
        self._head = self._model.get_output_embeddings()
        self._has_float32_logits = self._head.bias is None and devices.has_float32_product(self._head.weight)
        self.vocab_size: int = self._head.weight.shape[0]
        self.context_length: int = self.config.max_position_embeddings
        self._kinds = set(getattr(self.config, "layer_types", None) or ["full_attention"])
        self._recomputes = bool(self._kinds & _WITHOUT_CACHE)
        self._window: int | None = getattr(self.config, "sliding_window", None)  # in tokens, including the current one
        self.eos_ids = _eos_ids(folder, self._model)
        self.memory = devices.Storages(self.weights.values())
        self.routes = _routes(folder, self.config.to_dict()) if returns_routes else None
        self.keys = IndexedKeys.of(self.config.to_dict()) if returns_routes else None
        self._chosen = Chosen(self._body, self.routes, self.keys) if self.routes else None
        self._check_served()

    # ---- forward passes

    def new_cache(self, max_tokens: int) -> KVSlots:
        config = self.config
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        if (latent := getattr(config, "kv_lora_rank", None)) is not None:  # transformers caches what all heads share
            heads, head_dim = 1, max(latent, config.qk_rope_head_dim)
        numbers = sum(len(of.layers) * of.chosen for of in (self.routes, self.keys) if of)
        narrow = torch.int32 if self.keys else torch.int16  # torch has few operations for uint16
        routes = (numbers, narrow) if numbers else None
        if self._recomputes:  # in place of keys and values it holds the tokens' ids
            return KVSlots(1, 1, 1, torch.int64, max_tokens, self.device, routes)
        return KVSlots(config.num_hidden_layers, heads, head_dim, self.dtype, max_tokens, self.device, routes)

    def most_tokens(self, memory_fraction: float | None) -> int:
        """How many tokens a KV cache may hold: a share of the GPU's memory less the weights, by default 2 GiB.

        The default is at least one whole context.  Raises ValueError for a share without room for a token.
        """
        per_token, total = self.new_cache(1).bytes_per_token, devices.total_bytes(self.device)
        if memory_fraction is None or total is None:
            return max(self.context_length, _DEFAULT_CACHE_BYTES // per_token)
        tokens = (int(memory_fraction * total) - self.memory.num_bytes) // per_token
        if tokens < 1:
            raise ValueError(
                f"rollout.memory_fraction={memory_fraction}: it leaves no memory for the KV cache beside weights of "
                f"{self.memory.num_bytes / 2**30:.1f} GiB on a GPU of {total / 2**30:.0f} GiB; expected a larger share"
            )
        return tokens

    def prefill(self, tokens: Tensor, cache: Prefill) -> Tensor:
        """New tokens of sequences [S, P], right-padded with any token -> their hidden states [S, P, H]."""
        at = cache.starts[:, None] + torch.arange(tokens.shape[1], device=self.device)
        at = at.clamp(max=cache.length - 1)  # padding attends to something, also with a sliding window: no NaN
        mask = self._mask(at[:, None, :, None], torch.arange(cache.length, device=self.device))
        return self._hidden(tokens, at, mask, cache)

    def decode(self, tokens: Tensor, cache: Decode, positions: Tensor, length: int) -> Tensor:
        """The last token of each row [R] at its position [R] -> logits [R, V]; `length` is the largest position + 1."""
        mask = self._mask(positions[:, None, None, None], torch.arange(length, device=self.device))
        return self.logits(self._hidden(tokens[:, None], positions[:, None], mask, cache)[:, 0])

    def _mask(self, at: Tensor, of: Tensor) -> Tensor | dict[str, Tensor]:
        """0 or -inf, added to the attention scores: query positions `at` [.., 1], key positions `of` [K] -> [.., K].

        One for each kind of layer if there are several.
        """
        if self.config.model_type in _WITH_SINKS:
            return {kind: self._mask_of(at, of, None if kind == "full_attention" else self._window) for kind in _KINDS}
        return self._mask_of(at, of, self._window)

    def _mask_of(self, at: Tensor, of: Tensor, window: int | None) -> Tensor:
        hidden = of > at
        if window is not None:
            hidden = hidden | (of <= at - window)
        return torch.zeros(hidden.shape, dtype=self.dtype, device=self.device).masked_fill_(hidden, -torch.inf)

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., H] -> [..., V]; on a GPU those of a 16-bit model are float32, as the trainer's and SGLang's."""
        if not self._has_float32_logits:
            return self._head(hidden)
        flat = torch.mm(hidden.reshape(-1, hidden.size(-1)), self._head.weight.T, out_dtype=torch.float32)
        return flat.view(*hidden.shape[:-1], self.vocab_size)

    def _hidden(
        self, tokens: Tensor, positions: Tensor, mask: Tensor | dict[str, Tensor], cache: Prefill | Decode
    ) -> Tensor:
        if self._chosen:
            self._chosen.begin()
        if self._recomputes:
            return self._hidden_of_whole(tokens, positions, cache)
        out = self._body(
            input_ids=tokens, position_ids=positions, attention_mask=mask, past_key_values=cache, use_cache=True
        )
        if self._chosen:
            cache.store_routes(self._chosen.take(tokens.shape))
        return out.last_hidden_state

    def _hidden_of_whole(self, tokens: Tensor, positions: Tensor, cache: Prefill | Decode) -> Tensor:
        """The same by a pass over whole sequences; what is behind their ends no token of theirs sees."""
        ids, _ = cache.update(tokens[:, None, :, None], tokens[:, None, :, None], 0)
        hidden, routes = [], []
        for rows, at in self._at_once(ids[:, 0, :, 0], positions):
            whole: Tensor = self._body(input_ids=rows, use_cache=False).last_hidden_state
            hidden.append(whole.take_along_dim(at[:, :, None], 1))
            if self._chosen:
                routes.append(self._chosen.take(rows.shape).take_along_dim(at[:, :, None], 1))
                self._chosen.begin()
        if self._chosen:
            cache.store_routes(torch.cat(routes))
        return torch.cat(hidden)

    def _at_once(self, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Rows of [R, length] and others [R, ...] in groups whose activations fit in memory."""
        rows = max(1, _MOST_RECOMPUTED // tensors[0].size(1))
        return zip(*(tensor.split(rows) for tensor in tensors), strict=True)

    # ---- weights

    def check_memory(self) -> None:
        """Raises ValueError while the memory of the weights is released."""
        if self.memory.released:
            raise ValueError("the weights are released: expected /resume_memory_occupation first")

    def check_weights(self, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]) -> None:
        """Raises ValueError that lists every name that is unknown or has another shape or dtype than in the model."""
        wrong = []
        for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
            held = self.weights.get(name)
            if held is None:
                wrong.append(f"{name}: unknown")
            elif list(held.shape) != list(shape):
                wrong.append(f"{name}: shape {list(shape)}, expected {list(held.shape)}")
            elif DTYPE_NAMES[held.dtype] != dtype:
                wrong.append(f"{name}: dtype {dtype}, expected {DTYPE_NAMES[held.dtype]}")
        if wrong:
            raise ValueError("nothing was loaded, because of " + "; ".join(wrong))

    def load_weights(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy tensors that `check_weights` accepted, from any device, into the model; returns when it is done."""
        for name, tensor in tensors.items():
            self.weights[name].copy_(tensor)
        devices.finish(self.device)

    def read_folder(self, folder: str) -> dict[str, Tensor]:
        """All weights of another folder in the model's dtypes, checked. Raises ValueError, also for a missing name."""
        tensors: dict[str, Tensor] = {}
        left_out = ignorable(self._numbers, "actor")
        with open_for(folder, self._numbers) as held:
            for name in (n for n in held.hub_shapes if n in self.weights or n not in left_out):
                dtype = self.weights[name].dtype if name in self.weights else self.dtype
                tensors[name] = held.read_hub(name).to(dtype)
        missing = sorted(set(self.weights) - set(tensors))
        if missing:
            raise ValueError(f"nothing was loaded, because {folder} lacks {', '.join(missing)}")
        self.check_weights(
            list(tensors), [DTYPE_NAMES[t.dtype] for t in tensors.values()], [t.shape for t in tensors.values()]
        )
        return tensors

    def checksums(self) -> dict[str, str]:
        """As SGLang hashes: with SHA-256 on a CPU, on a GPU with a sum over words, which the GPU computes itself."""
        self.check_memory()
        kind: Kind = "words" if self.device.type == "cuda" else "sha256"
        return {name: digest(tensor, kind) for name, tensor in self.weights.items()}

    def _named_weights(self, held: HFFolder) -> dict[str, Tensor]:
        """The weights by their names in the folder: of tied weights only the stored name."""
        all_of_model, stored = hub_tensors(self._model, self.config.model_type), held.hub_shapes
        weights = {name: tensor for name, tensor in all_of_model.items() if name in stored}
        covered = {tensor.data_ptr() for tensor in weights.values()}
        nameless = sorted(name for name, tensor in all_of_model.items() if tensor.data_ptr() not in covered)
        if nameless:
            raise ValueError(misfit(self.folder, {"missing": nameless}))
        for name, tensor in weights.items():
            check_finite(tensor, name, held.path_of(name))
        return weights

    def _correct(self, held: HFFolder) -> None:
        """Read what transformers reads otherwise than the trainer.

        Of a tensor in several files it may take another than the index names, and it casts with the weights what is
        float32 whatever their type: biases of routers for some families, and decays.
        """
        table = table_for(self._numbers) if self._numbers.get("model_type") in FAMILIES else []
        float32 = {name for op in table if op.keeps_dtype for name in op.hf_shapes}
        for name, tensor in self.weights.items():  # a folder may have further layers, which are not served
            if name in held.in_several:
                tensor.copy_(held.read_hub(name))
            if name in float32:
                tensor.data = held.read_hub(name).float().to(self.device)

    def _check_served(self) -> None:
        """Raises ValueError for a model whose forward pass differs from `_hidden` and `logits`."""
        of_most = {"full_attention"} | _WITHOUT_CACHE | _OF_EACH_TOKEN
        served = _KINDS if self.config.model_type in _WITH_SINKS else of_most
        if not self._kinds <= served:
            raise ValueError(
                f"{self.folder}: the hf engine serves {sorted(served)} layers, found {sorted(self._kinds)}"
            )
        rope = (getattr(self.config, "rope_parameters", None) or {}).get("rope_type", "default")
        if rope in ("dynamic", "longrope"):  # their angles depend on the longest sequence in the batch
            raise ValueError(f"{self.folder}: rope_type={rope!r}: expected one of default, linear, llama3, yarn")
        tokens = torch.arange(3, device=self.device)[None] % self.vocab_size
        cache = self.new_cache(max_tokens=3)
        cache.reserve(1, 3, used=(0, 0))
        with torch.inference_mode():
            ours = self.logits(self.prefill(tokens, Prefill(cache, 0, [0], [0], [3])))
            theirs = self._model(input_ids=tokens, use_cache=False).logits
        # a tolerance far above rounding even in bfloat16, far below the effect of a scaling or capping of the logits
        if not torch.allclose(ours.float(), theirs.float(), rtol=0.05, atol=0.05):
            kind = type(self._model).__name__
            raise ValueError(
                f"{self.folder}: the hf engine cannot serve {kind}, expected a relative of Llama or Mixtral"
            )


def _unlimit_steps(model: nn.Module) -> None:
    """Let a Mamba mixer take steps of any length, as Megatron and SGLang do.

    transformers takes time_step_min for the shortest one, by which the biases of steps are drawn.
    """
    module: Any
    for module in model.modules():
        if hasattr(module, "time_step_limit"):
            module.time_step_limit = (0.0, torch.inf)


def _routes(folder: str, config: Mapping[str, Any]) -> RoutedExperts:
    if (found := RoutedExperts.of(config)) is None:
        raise ValueError(f"{folder}: its layers have no experts, expected none of --enable-return-routed-experts")
    return found


def _eos_ids(folder: str, model: torch.nn.Module) -> tuple[int, ...]:
    """All end-of-sequence ids of the configuration, the generation configuration and the tokenizer."""
    ids_of_all: set[int] = set()
    for source in (model.config, model.generation_config):
        ids = getattr(source, "eos_token_id", None)
        ids_of_all |= {ids} if isinstance(ids, int) else set(ids or ())
    if (Path(folder) / "tokenizer_config.json").exists():
        tokenizer_id = AutoTokenizer.from_pretrained(folder, local_files_only=True).eos_token_id
        ids_of_all |= set() if tokenizer_id is None else {tokenizer_id}
    return tuple(sorted(ids_of_all))
