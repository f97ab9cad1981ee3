"""Checks each role's model before it is loaded, by the numbers in its config.json."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from os.path import exists, isfile
from pathlib import Path
from typing import Any

from megarl.arch.hf_config import completed, has_vision_part, text_part
from megarl.arch.layout import RANDOM_WEIGHTS, ModelNumbers, has_states, numbers_of
from megarl.arch.megatron_fields import CPU_OFFLOAD, OPTIMIZER
from megarl.arch.model_types import MISSING, needs_newer
from megarl.arch.mtp import with_mtp
from megarl.config.names import SUPERVISED
from megarl.config.schema import Config
from megarl.config.schema.record import Range
from megarl.config.settings import ConfigError, show

# If preset and folder differ in one of these, they are different models.
SHAPE = (
    "model_type hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
    "vocab_size tie_word_embeddings num_experts num_local_experts n_routed_experts n_shared_experts "
    "num_experts_per_tok moe_intermediate_size first_k_dense_replace q_lora_rank kv_lora_rank qk_rope_head_dim "
    "qk_nope_head_dim v_head_dim"
)
_OTHER_PARTS = ("vision_config", "audio_config", "thinker_config")  # of models of text and more
MINI_PLACE = "runs/models/"  # where presets of very small models, which a run makes itself, look for them
_ROUND, _MOST_PADDING = 64, 512  # vocabularies are padded to multiples of the first, rarely by more than the second


def group_of(role: str) -> str:
    """The group of keys that names a role's model: "model" or "critic.model"."""
    return "model" if role == "actor" else f"{role}.model"


def model_of(config: Config, role: str) -> Any:
    """The group of keys that `group_of` names."""
    return config.model if role == "actor" else config.role(role).model


def model_config(config: Config, role: str) -> dict[str, Any]:
    """config.json of a role's model, from its folder if it exists, else from model.config; {} if neither exists."""
    node = model_of(config, role)
    if (file := _file(node.path)) is None:
        return node.config
    return _numbers_in(file, f"{group_of(role)}.path={node.path}")


def supervised_lr(config: Config) -> float | None:
    """The peak learning rate of supervised training: 1.4e-5 for 7B, 8e-4 for a model of width 64; None: width unknown.

    The best rate of Adam falls as 1 / width (https://arxiv.org/abs/2203.03466); one for RL would hardly move a model.
    """
    width = model_config(config, "actor").get("hidden_size")
    return round(0.05 / width, 7) if isinstance(width, int) and width > 0 else None


def config_of_folder(path: str) -> dict[str, Any]:
    """The config.json of a folder, as `model_config` reads it; {} if there is none."""
    return _numbers_in(file, path) if (file := _file(path)) else {}


def folder_has_vision(path: str) -> bool:
    return (file := _file(path)) is not None and has_vision_part(read_object(file))


def _numbers_in(file: Path, place: str) -> dict[str, Any]:
    """A config.json completed by its family's class, unless `invalid_numbers` has something to say about it."""
    try:
        found = dict(text_part(read_object(file)))
        return found if any(invalid_fields(found)) else completed(found)
    except ValueError as error:
        raise ConfigError(f"{place}: {error}") from None


def invalid_numbers(config: Config, roles: tuple[str, ...]) -> Iterator[str]:
    """One sentence for each field of these roles' models that is of another type than a layout can be checked with."""
    for role in with_own_models(config, roles):
        path, given = model_of(config, role).path, not has_folder(config, role)
        place = f"{group_of(role)}.config." if given else f"{group_of(role)}.path={path}: its config.json says "
        try:
            yield from (f"{place}{sentence}" for sentence in invalid_fields(model_config(config, role)))
        except ConfigError as error:
            yield str(error)


def with_own_models(config: Config, roles: tuple[str, ...]) -> tuple[str, ...]:
    """Of the roles with one and the same model the first."""
    first: dict[str, str] = {}
    for role in roles:
        node = model_of(config, role)
        first.setdefault(node.path if has_folder(config, role) else f"{node.path} {node.config}", role)
    return tuple(first.values())


def has_folder(config: Config, role: str) -> bool:
    """Does the config.json of a role's model exist?"""
    return is_here(model_of(config, role).path)


def is_here(path: str) -> bool:
    """Does the config.json of a folder, or of a hub name, exist on this machine?"""
    return _file(path) is not None


def may_be_hub_name(path: str) -> bool:
    """OWNER/NAME, or NAME; a folder that is not there has such a path, too."""
    return path.count("/") <= 1 and not path.startswith((".", "~", "/"))


def missing_folder(path: str, key: str) -> str:
    """The sentence for a model's folder that is not there, where the path is no name of a hub either; else ""."""
    if Path(path).is_dir() or may_be_hub_name(path):  # a hub is asked only for what may be there
        return ""
    return f"{key}={path}: no such folder; expected a folder with a config.json, or a hub name"


def missing_folders(config: Config, roles: tuple[str, ...]) -> Iterator[str]:
    """The sentence of `missing_folder` for each model that the run does not make itself."""
    for role in with_own_models(config, roles):
        path = model_of(config, role).path
        if path and not path.startswith(MINI_PLACE) and (sentence := missing_folder(path, f"{group_of(role)}.path")):
            yield sentence


def to_prepare(config: Config) -> list[str]:
    """The roles whose models trainer.prepare makes, as they are not there yet."""
    made = ("actor", *config.teacher_roles) if config.trainer.prepare else ()
    return [role for role in made if not has_folder(config, role)]


def model_numbers(config: Config, role: str) -> ModelNumbers:
    """The model's numbers that the role's layout must fit."""
    return numbers_of(model_config(config, role))


def contradictions(config: Config, role: str) -> Iterator[str]:
    """One sentence if model.config and the folder are different models."""
    node, found = model_of(config, role), model_config(config, role)
    for key in SHAPE.split():
        given = node.config.get(key)
        if key in found and given is not None and found[key] != given:
            said = f"the config.json of {group_of(role)}.path={node.path} says {show(found[key])}"
            yield f"{group_of(role)}.config.{key}={show(given)}: {said}; expected the same, or another model"
            return


def unfit(config: Config, roles: tuple[str, ...]) -> Iterator[str]:
    """One sentence for each model that no run takes, or that Megatron-Core cannot compute; the roles: those on ranks.

    bench_ring.py's folders have no trained weights; only its own runs, with dummy servers, may use them.
    """
    may_be_random = "--load-format dummy" in " ".join(config.rollout.sglang.args).replace("=", " ")
    for role in with_own_models(config, roles or ("actor",)):
        hf, place = model_config(config, role), f"{group_of(role)}.path={model_of(config, role).path}"
        if hf.get(RANDOM_WEIGHTS) is True and not may_be_random:
            yield f"{place}: its weights are random, for benchmarks/ring/bench_ring.py only; expected a model"
        if roles and (missing := MISSING.get(str(hf.get("model_type")))):
            yield f"{place}: it is of model_type {hf['model_type']}, and {missing}"
        if sentence := more_than_text(hf):
            yield f"{place}: {sentence}"
        if roles and role in ("actor", "critic") and has_states(hf):
            yield from _of_layers(config, role, hf)


def _of_layers(config: Config, role: str, hf: dict[str, Any]) -> Iterator[str]:
    """What would be wrong, or was not proved, for gated delta nets, Mamba mixers and sparse attention."""
    layers = f"{hf['model_type']} has layers for which it is not made; expected"
    yield from _unproved(config, role, layers)
    if role == "actor" and config.actor.router_replay != "off" and not hf.get("index_topk"):
        yield f"actor.router_replay={config.actor.router_replay}: {layers} off"
    # A gated delta net takes the weight of its convolution (gdn.py:184), and sparse attention those of its linears,
    # and none calls the module, for which Megatron would gather it.
    if config.role(role).megatron.overlap_param_gather and hf["model_type"] != "nemotron_h":
        yield f"{role}.megatron.overlap_param_gather=true: {layers} false"


def _unproved(config: Config, role: str, why: str) -> Iterator[str]:
    """The ways to train that were not proved for some models; `why` ends before what is expected."""
    node = config.role(role)
    if node.optim.name == "muon":
        yield f"{role}.optim.name=muon: {why} adamw"
    if node.strategy == "fsdp":
        yield f"{role}.strategy=fsdp: {why} megatron"
    if role == "actor" and config.actor.lora.rank:
        yield f"actor.lora.rank={config.actor.lora.rank}: {why} 0"


def of_long_rows(config: Config, roles: tuple[str, ...]) -> Iterator[str]:
    """A line on the models that Megatron-Core computes by comparing all tokens of a row with each other."""
    for role in with_own_models(config, roles):
        if model_config(config, role).get("index_topk"):
            grow = "time and memory of its sparse attention grow with the square of a micro-batch's tokens"
            yield f"{group_of(role)}.path={model_of(config, role).path}: {grow}; keep ppo_max_token_len_per_gpu small"


def of_mtp(config: Config, roles: tuple[str, ...]) -> Iterator[str]:
    """What does not go together with the training of MTP layers, or was not proved."""
    actor, megatron = config.actor, config.actor.megatron
    why = f"actor.mtp={actor.mtp} is not made for it; expected"
    if actor.mtp == "off" or "actor" not in roles:
        return
    if newer := needs_newer("", actor.mtp):
        yield newer
    try:
        with_mtp(hf := model_config(config, "actor"), actor.mtp if hf else "off")
    except ValueError as error:
        yield f"actor.{error}"
    yield from _unproved(config, "actor", why)
    if actor.optim.on_host:
        yield f"actor.optim.{OPTIMIZER}.{CPU_OFFLOAD}=true: {why} false"
    if megatron.recompute_method == "uniform" and megatron.recompute_num_layers != 1:
        yield f"actor.megatron.recompute_num_layers={megatron.recompute_num_layers}: {why} 1, or recompute_method=block"


def more_than_text(hf: dict[str, Any]) -> str:
    """Why a model is none of text alone, by its config.json; "" if it is one."""
    parts = [name for name in _OTHER_PARTS if hf.get(name)]
    kinds = [kind for kind in hf.get("architectures") or [] if str(kind).endswith("ForConditionalGeneration")]
    found = f"has {parts[0]}" if parts else f"says architectures={show(kinds)}" if kinds else ""
    return found and f"its config.json {found}; expected a model of text alone, *ForCausalLM"


def vocabularies(config: Config, roles: tuple[str, ...]) -> Iterator[str]:
    """Critic and reference read the actor's tokens; their vocabulary may be smaller only by padding.

    Qwen2.5 has one tokenizer of 151,665 tokens, and models with 151,936 and with 152,064 embedding rows.
    """
    ours = model_numbers(config, "actor").vocab_size
    for role in roles:
        theirs = model_numbers(config, role).vocab_size
        if ours is None or theirs is None or theirs == ours:
            continue
        said = f"its vocabulary has {theirs} tokens, and that of model.path={config.model.path} has {ours}"
        if role == "ref" and config.full_kl:
            yield f"ref.model.path={config.ref.model.path}: {said}; {config.full_kl} needs the same number"
        elif theirs < ours and role in config.teacher_roles and (whole := config.divergence_of_vocabulary):
            yield f"{role}.model.path={model_of(config, role).path}: {said}; {whole} needs at least as many"
        elif theirs < ours and not _is_padding(config, theirs, ours):
            yield f"{role}.model.path={model_of(config, role).path}: {said}; expected a model that knows them all"


def _is_padding(config: Config, smaller: int, larger: int) -> bool:
    """Are all tokens of the tokenizer inside the smaller vocabulary?

    If the tokenizer is not on this machine, two round numbers close to each other count as the same vocabulary; the
    tokenizer is checked when it is loaded.
    """
    highest = _highest_id(Path(config.model.tokenizer_path) / "tokenizer.json")
    if highest is not None:
        return highest < smaller
    return smaller % _ROUND == larger % _ROUND == 0 and larger - smaller <= _MOST_PADDING


def _highest_id(file: Path) -> int | None:
    try:
        found = json.loads(file.read_bytes())
        return max([*found["model"]["vocab"].values(), *(token["id"] for token in found.get("added_tokens") or ())])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # missing, or a tokenizer without such a table
        return None


def lengths(config: Config, roles: tuple[str, ...], command: str) -> Iterator[str]:
    """One sentence for each model with fewer positions than the longest sequence."""
    for role in with_own_models(config, roles):
        known = model_numbers(config, role).max_position_embeddings
        name, longest = longest_sequence(config, command, is_served=role == "actor")
        if known is not None and longest > known:
            said = f"{group_of(role)}.path={model_of(config, role).path} knows {known} positions"
            yield f"{name}={longest}: {said} (max_position_embeddings); expected at most {known}"


def longest_sequence(config: Config, command: str, *, is_served: bool = False) -> tuple[str, int]:
    """The keys of the longest sample, or row of supervised training, and its length in tokens.

    `is_served`: or of the longest one that servers generate.
    """
    if command in SUPERVISED:
        return "sft.max_length", config.sft.max_length
    if not is_served:
        return config.longest
    return config.longest_evaluated if command == "evaluate" else config.longest_served


def _file(path: str) -> Path | None:
    """The config.json of a folder, or that of a hub name which was downloaded before."""
    file = Path(path) / "config.json"
    if not path or isfile(file):  # False too for what can be no path
        return file if path else None
    return _cached(path) if may_be_hub_name(path) and not exists(path) else None


def _cached(name: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache  # which only a hub name needs

    try:
        found = try_to_load_from_cache(name, "config.json")
    except ValueError:  # no name of a hub
        return None
    return Path(found) if isinstance(found, str) else None


def _is_whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


_SIZE = Range(lambda v: _is_whole(v, 1), "an integer of at least 1")
_COUNT = Range(lambda v: _is_whole(v, 0), "an integer of at least 0")
_GROUP = Range(lambda v: isinstance(v, dict), "a group of fields")
_TEXT = Range(lambda v: isinstance(v, str), "text")
_SIZES = (
    "num_attention_heads num_key_value_heads hidden_size head_dim intermediate_size vocab_size max_position_embeddings "
    "decoder_sparse_step linear_num_key_heads mamba_num_heads n_groups"
)
_COUNTS = (
    "num_experts num_local_experts n_routed_experts n_shared_experts num_experts_per_tok moe_intermediate_size "
    "first_k_dense_replace q_lora_rank kv_lora_rank qk_rope_head_dim qk_nope_head_dim v_head_dim"
)
_FIELDS: dict[str, Range] = {
    **dict.fromkeys(_SIZES.split(), _SIZE),
    **dict.fromkeys(_COUNTS.split(), _COUNT),
    # Bounded, as classes of transformers make a list of as many kinds of layers.
    "num_hidden_layers": Range(lambda v: _is_whole(v, 1) and v <= 10_000, "an integer from 1 to 10000"),
    "model_type": _TEXT,
    "architectures": Range(lambda v: isinstance(v, list) and all(isinstance(x, str) for x in v), "a list of texts"),
    "mlp_only_layers": Range(
        lambda v: isinstance(v, list) and all(_is_whole(x, 0) for x in v), "a list of layers from 0"
    ),
    "quantization_config": _GROUP,
    "rope_scaling": _GROUP,
    "rope_parameters": _GROUP,
}
_ROPE: dict[str, Range] = {
    "original_max_position_embeddings": _SIZE,
    "factor": Range(
        lambda v: isinstance(v, int | float) and not isinstance(v, bool) and 0 < v < float("inf"),
        "a number above 0",
    ),
}


def read_object(file: Path) -> dict[str, Any]:
    """The fields of a JSON file.  Raises: ConfigError, one sentence that begins with "its NAME", if there are none."""
    try:
        found = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"its {file.name} cannot be read ({' '.join(str(error).split())})") from None
    if not isinstance(found, dict):
        raise ConfigError(f"its {file.name} is {type(found).__name__}, expected an object of fields")
    return found


def invalid_fields(hf: Mapping[str, Any]) -> Iterator[str]:
    """One sentence, `FIELD=VALUE: expected ...`, for each field of a config.json that is of another type."""
    yield from _invalid(hf, _FIELDS, "")
    for group in ("rope_scaling", "rope_parameters"):
        rope = hf.get(group)
        if isinstance(rope, dict):
            yield from _invalid(rope, _ROPE, f"{group}.")


def _invalid(fields: Mapping[str, Any], rules: dict[str, Range], prefix: str) -> Iterator[str]:
    for name, allowed in rules.items():
        value = fields.get(name)
        if value is not None and not allowed.test(value):
            yield f"{prefix}{name}={show(value)}: expected {allowed.wanted}"
