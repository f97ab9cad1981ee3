"""Fields of Megatron's classes that a run may set: test_override_fields.py has what each does."""

from typing import get_args, get_origin, get_type_hints

import pytest
import torch
from config_helpers import DENSE, load, refusal
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import TransformerConfig
from tiny_models import FAMILIES, tiny_model

from megarl.arch.hf_config import completed
from megarl.arch.layout import Layout
from megarl.arch.megatron_fields import FUSIONS, OPTIMIZER, TRANSFORMER, TRIED, WRAPPER
from megarl.config.validate.algorithms import idle
from megarl.mcore.models.execution import ExecutionOptions
from megarl.mcore.models.families import family_of
from megarl.mcore.models.model import transformer_config
from megarl.mcore.training.cpu_adam import check_cpu_adam
from megarl.mcore.training.optimizer import OptimSettings
from megarl.trainer.build import optim_settings

CLASSES = {TRANSFORMER: TransformerConfig, WRAPPER: DistributedDataParallelConfig, OPTIMIZER: OptimizerConfig}


@pytest.mark.parametrize("group", CLASSES)
def test_the_fields_are_those_of_the_class_with_their_types(group: str) -> None:
    types = get_type_hints(CLASSES[group])
    for name, field in TRIED[group].items():
        kinds = set(get_args(types[name])) or {types[name]}
        assert field.kind in {get_origin(kind) or kind for kind in kinds}


@pytest.mark.parametrize("family", FAMILIES)
def test_no_field_that_is_set_here_can_be_set(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hf = completed(tiny_model(family, tied=False).config.to_dict())
    seen: dict[str, object] = {}

    def note(self: TransformerConfig, **settings: object) -> None:  # noqa: ARG001
        seen.update(settings)

    monkeypatch.setattr(family_of(hf).config, "__init__", note)
    transformer_config(hf, Layout(), torch.float32)
    assert len(seen) > 20 and seen.keys() & TRIED[TRANSFORMER].keys() <= set(FUSIONS)


def test_a_field_reaches_megatrons_configuration() -> None:
    hf = tiny_model("qwen2", tied=False).config.to_dict()
    given = {"batch_p2p_sync": False, "recompute_modules": ["mlp"]}
    built = transformer_config(hf, Layout(), torch.float32, ExecutionOptions(override_transformer_config=given))
    assert (built.batch_p2p_sync, built.recompute_modules) == (False, ["mlp"])


@pytest.mark.parametrize(
    ("word", "told"),
    [
        (f"{TRANSFORMER}.batch_p2p_sink=true", "or Megatron has none; did you mean batch_p2p_sync?"),
        (f"{TRANSFORMER}.batch_p2p_sync=3", "expected true or false"),
        (f"{TRANSFORMER}.num_layers=3", "a run sets this field itself, was never tried with it, "),
        (f"{TRANSFORMER}.tp_comm_overlap=true", "was never tried with it, or Megatron has none; expected one of bat"),
        (f"{TRANSFORMER}.tensor_model_parallel_size=2", "expected actor.megatron.tensor_model_parallel_size"),
        (f"{TRANSFORMER}.recompute_modules=[attn]", "expected [some of core_attn, layernorm, mla_up_proj, mlp, moe, "),
        (f"{TRANSFORMER}.recompute_modules=[mlp]", "expected actor.megatron.recompute_granularity=selective with it"),
        (f"{TRANSFORMER}.recompute_modules=[[mlp]]", "expected [some of core_attn, "),
        (f"{TRANSFORMER}.recompute_modules=mlp", "expected [some of core_attn, "),
        (f"{WRAPPER}.bucket_size=0", "expected a whole number above 0"),
        (f"{WRAPPER}.grad_reduce_in_fp32=false", "gradients are always summed in float32"),
        (f"{OPTIMIZER}.optimizer_cpu_ofload=true", "did you mean optimizer_cpu_offload?"),
        (f"{OPTIMIZER}.overlap_cpu_optimizer_d2h_h2d=3", "expected true or false"),
        (f"{OPTIMIZER}.lr=0.1", "expected actor.optim"),
        (f"{OPTIMIZER}.clip_grad=0.5", "expected actor.max_grad_norm"),
    ],
)
def test_a_field_that_cannot_be_set_or_not_so_is_refused(word: str, told: str) -> None:
    word = f"actor.{'optim' if word.startswith(OPTIMIZER) else 'megatron'}.{word}"
    said = refusal(word)
    assert said.startswith(f"{word}: ") and told in said


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("recompute_modules=[mla_up_proj]", "mla_up_proj is of latent attention, which the model has not"),
        ("recompute_modules=[moe_act]", "only Transformer Engine's layers compute layernorm and moe_act again"),
    ],
)
def test_what_the_layers_of_a_run_do_not_compute_again_is_refused_before_it(words: str, told: str) -> None:
    selective = "actor.megatron.recompute_granularity=selective"
    assert told in refusal("model=qwen3_moe_mini", selective, f"actor.megatron.{TRANSFORMER}.{words}")


def test_no_modules_are_no_way_to_compute_selectively() -> None:
    none = f"actor.megatron.{TRANSFORMER}.recompute_modules=[]"
    assert load(none).actor.megatron.override_transformer_config == {"recompute_modules": []}
    said = refusal(none, "actor.megatron.recompute_granularity=selective")
    assert said == f"{none}: expected actor.megatron.recompute_granularity=null, or full, with it"


FULL_CRITIC = [f"critic.megatron.recompute_{key}" for key in ("granularity=full", "method=uniform", "num_layers=1")]
SELECTIVE = ("actor.megatron.recompute_granularity=selective", "algorithm.adv_estimator=gae")


@pytest.mark.parametrize(
    ("modules", "words"),
    [
        ("moe_act", ["critic.megatron.transformer_impl=local", "model.dtype=bfloat16"]),
        ("mlp", ["critic.megatron.override_transformer_config.recompute_modules=[mlp]", *FULL_CRITIC]),
    ],
)
def test_modules_of_the_actors_must_suit_the_role_that_follows_it(modules: str, words: list[str]) -> None:
    given = f"{TRANSFORMER}.recompute_modules=[{modules}]"
    said = refusal(f"actor.megatron.{given}", *SELECTIVE, *words)
    assert said.startswith(f"critic.megatron.{given}: ")
    latents = f"actor.megatron.{TRANSFORMER}.recompute_modules=[mla_up_proj]"
    assert "critic" not in refusal(latents, DENSE, *SELECTIVE), "what is wrong with the actor, too, is told once"
    assert load(latents, *SELECTIVE), "a model that is not here yet may have them"


def test_a_critic_with_another_granularity_has_not_the_actors_modules() -> None:
    modules = f"actor.megatron.{TRANSFORMER}={{recompute_modules:[mlp],batch_p2p_sync:false}}"
    config = load(modules, *SELECTIVE, *FULL_CRITIC)
    assert config.critic.megatron.override_transformer_config == {"batch_p2p_sync": False}
    assert config.ref.megatron.override_transformer_config["recompute_modules"] == ["mlp"]
    told = [line for line in idle(config) if "recompute" in line]
    assert told == [
        "critic.megatron.recompute_granularity=full: the actor's recompute_modules=[mlp] are not the critic's"
    ]
    assert not [line for line in idle(load(modules, *SELECTIVE)) if "recompute" in line]


def test_layers_that_only_transformer_engine_computes_again_are_refused_to_local_ones() -> None:
    hf = tiny_model("qwen3_moe", tied=False).config.to_dict()
    engine = ExecutionOptions(
        recompute_granularity="selective", override_transformer_config={"recompute_modules": ["moe_act", "mlp"]}
    )
    with pytest.raises(ValueError, match="^recompute_modules: moe_act: only Transformer Engine's layers compute it"):
        transformer_config(hf, Layout(), torch.float32, engine)


def test_other_roles_have_the_actors_fields_unless_they_have_their_own() -> None:
    same = load(f"actor.megatron.{WRAPPER}.bucket_size=40000000")
    assert same.critic.megatron.override_ddp_config == {"bucket_size": 40000000}
    own = load(f"actor.megatron.{WRAPPER}.bucket_size=40000000", f"critic.megatron.{WRAPPER}.bucket_size=1000")
    assert own.critic.megatron.override_ddp_config == {"bucket_size": 1000}
    assert own.actor.megatron.override_ddp_config == {"bucket_size": 40000000}


ON_HOST = f"actor.optim.{OPTIMIZER}={{optimizer_cpu_offload:true,optimizer_offload_fraction:1.0}}"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("trainer.device=cpu", "needs a GPU's streams, and trainer.device=cpu has none"),
        ("actor.optim.name=sgd", "expected actor.optim.name=adamw, it is sgd"),
        ("model.dtype=float32 actor.megatron.use_distributed_optimizer=true", "expected model.dtype=bfloat16 or"),
        (f"actor.optim.{OPTIMIZER}.optimizer_offload_fraction=0.5", "optimizer_offload_fraction=0.5: expected 1.0"),
    ],
)
def test_what_megatrons_optimizer_on_the_host_needs_is_said(words: str, told: str) -> None:
    assert told in refusal(ON_HOST, *words.split())


def test_megatrons_optimizer_on_the_host_is_refused_without_a_gpu_and_its_fields_are_handed_on() -> None:
    """It asks for a stream of the GPU when it is made, so that it cannot even be made here."""
    config = load(ON_HOST, f"actor.optim.{OPTIMIZER}.overlap_cpu_optimizer_d2h_h2d=true")
    settings = OptimSettings(**optim_settings(config.actor, 10))
    given = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0, "overlap_cpu_optimizer_d2h_h2d": True}
    assert settings.override_optimizer_config == given
    built = OptimizerConfig(optimizer="adam", lr=settings.lr, **settings.override_optimizer_config)
    assert (built.optimizer_cpu_offload, built.optimizer_offload_fraction) == (True, 1.0)
    assert config.critic.optim.override_optimizer_config == {}, "the critic's optimizer is its own"
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="needs a GPU's streams, and there is no GPU"):
            check_cpu_adam(settings.override_optimizer_config, name="adamw", is_wrapped=True)
    check_cpu_adam({}, name="muon", is_wrapped=False)
