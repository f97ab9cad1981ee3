"""Fields of Megatron's classes that a run may set: the names and types of Megatron's source, without those we set."""

from dataclasses import fields as dataclass_fields

import pytest
import torch
from config_helpers import load, refusal
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import TransformerConfig
from tiny_models import FAMILIES, tiny_model

from megarl.layout import Layout
from megarl.mcore.models.families import family_of
from megarl.mcore.models.model import transformer_config
from megarl.mcore.training.cpu_adam import check_cpu_adam
from megarl.mcore.training.execution import ExecutionOptions
from megarl.mcore.training.optimizer import OptimSettings
from megarl.megatron_fields import FUSIONS, OPTIMIZER, OWN, TRANSFORMER, WRAPPER, fault, fields
from megarl.trainer.build import optim_settings

CLASSES = {TRANSFORMER: TransformerConfig, WRAPPER: DistributedDataParallelConfig, OPTIMIZER: OptimizerConfig}


@pytest.mark.parametrize("group", CLASSES)
def test_the_fields_that_are_read_from_source_are_those_of_the_class(group: str) -> None:
    there = {field.name for field in dataclass_fields(CLASSES[group])}
    assert there <= fields(group).keys()
    assert {name for name in fields(group) if not name.startswith("_")} <= there


@pytest.mark.parametrize("family", FAMILIES)
def test_each_field_that_is_set_here_is_refused_to_others(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hf = tiny_model(family, tied=False).config.to_dict()
    seen: dict[str, object] = {}

    def note(self: TransformerConfig, **settings: object) -> None:  # noqa: ARG001
        seen.update(settings)

    monkeypatch.setattr(family_of(hf).config, "__init__", note)
    transformer_config(hf, Layout(), torch.float32)
    assert seen.keys() <= OWN[TRANSFORMER].keys() | set(FUSIONS)


def test_a_field_reaches_megatrons_configuration() -> None:
    hf = tiny_model("qwen2", tied=False).config.to_dict()
    engine = ExecutionOptions(
        override_transformer_config={"tp_comm_overlap_ag": False, "fp32_residual_connection": True}
    )
    built = transformer_config(hf, Layout(), torch.float32, engine)
    assert (built.tp_comm_overlap_ag, built.fp32_residual_connection) == (False, True)


@pytest.mark.parametrize(
    ("word", "told"),
    [
        (f"{TRANSFORMER}.fp32_residual_conection=true", "TransformerConfig has no such field; did you mean fp32_resid"),
        (f"{TRANSFORMER}.fp32_residual_connection=3", "expected true or false"),
        (f"{TRANSFORMER}.num_layers=3", "the model's config.json sets it"),
        (f"{TRANSFORMER}.tensor_model_parallel_size=2", "expected actor.megatron.tensor_model_parallel_size"),
        (f"{TRANSFORMER}.cuda_graph_impl=mine", "expected one of none, local, transformer_engine"),
        (f"{TRANSFORMER}.init_method=normal", "cannot be given on a command line"),
        (f"{WRAPPER}.bucket_size=1.5", "expected an integer or null"),
        (f"{WRAPPER}.grad_reduce_in_fp32=false", "gradients are always summed in float32"),
        (f"{OPTIMIZER}.optimizer_cpu_ofload=true", "OptimizerConfig has no such field; did you mean optimizer_cpu_of"),
        (f"{OPTIMIZER}.pin_cpu_grads=3", "expected true or false"),
        (f"{OPTIMIZER}.lr=0.1", "expected actor.optim"),
        (f"{OPTIMIZER}.clip_grad=0.5", "expected actor.max_grad_norm"),
        (f"{OPTIMIZER}.store_param_remainders=true", "the gradient norm and the clipping read gradients in float32"),
        (f"{OPTIMIZER}.timers=x", "it would change nothing here"),
    ],
)
def test_a_field_that_is_unknown_set_here_or_of_another_type_is_refused(word: str, told: str) -> None:
    word = f"actor.{'optim' if word.startswith(OPTIMIZER) else 'megatron'}.{word}"
    said = refusal(word)
    assert said.startswith(f"{word}: ") and told in said


def test_only_a_field_that_can_be_set_is_proposed() -> None:
    said = fault(TRANSFORMER, "apply_rope_fuson", False, "actor")
    assert said.endswith("; did you mean apply_rope_fusion?")
    assert fault(TRANSFORMER, "apply_rope_fusion", False, "actor") == "", "a fusion can be switched off only"
    assert "wherever" in fault(TRANSFORMER, "apply_rope_fusion", True, "actor")
    for group, field in [(TRANSFORMER, "hiden_size"), (TRANSFORMER, "init_metod"), (OPTIMIZER, "clip_gradd")]:
        assert fault(group, field, 3, "actor").endswith(" has no such field")


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
    assert settings.override == given
    built = OptimizerConfig(optimizer="adam", lr=settings.lr, **settings.override)
    assert (built.optimizer_cpu_offload, built.optimizer_offload_fraction) == (True, 1.0)
    assert config.critic.optim.override_optimizer_config == {}, "the critic's optimizer is its own"
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="needs a GPU's streams, and there is no GPU"):
            check_cpu_adam(settings.override, name="adamw", is_wrapped=True)
    check_cpu_adam({}, name="muon", is_wrapped=False)
