"""How a role is computed: strategies, optimizers, recomputation and overlap that do not go together or do nothing."""

import pytest
from config_helpers import BASE, DENSE, EXPERTS, load, refusal

from megarl.config import load_config

ON_8 = ("trainer.n_gpus_per_node=8", "rollout.n=2")
TP2 = "actor.megatron.tensor_model_parallel_size=2"


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        ("actor.strategy=ddp", "actor.strategy=ddp: expected one of megatron, fsdp, none"),
        ("actor.megatron.transformer_impl=te", "expected one of auto, local, transformer_engine"),
        ("actor.megatron.moe_token_dispatcher_type=allgather", "expected one of auto, alltoall, flex"),
        (
            "actor.megatron.moe_token_dispatcher_type=flex trainer.device=cpu",
            "actor.megatron.moe_token_dispatcher_type=flex: it runs on GPUs only; expected auto or alltoall",
        ),
        (
            f"actor.megatron.moe_token_dispatcher_type=flex {DENSE}",
            "actor.megatron.moe_token_dispatcher_type=flex: the model has no experts; expected auto or alltoall",
        ),
        (
            f"actor.megatron.moe_token_dispatcher_type=flex {EXPERTS}",
            "actor.megatron.moe_token_dispatcher_type=flex: each rank has all experts whole; expected auto or alltoall",
        ),
        (
            f"actor.megatron.moe_token_dispatcher_type=flex {EXPERTS} actor.megatron.expert_model_parallel_size=2",
            "moe_token_dispatcher_type=flex: it sends bfloat16, and model.dtype=float32; expected auto or alltoall",
        ),
        (
            "actor.megatron.transformer_impl=transformer_engine trainer.device=cpu",
            "actor.megatron.transformer_impl=transformer_engine: it runs on GPUs only; expected auto or local",
        ),
        (
            "actor.megatron.transformer_impl=transformer_engine actor.lora.rank=8",
            "actor.megatron.transformer_impl=transformer_engine: adapters need local layers, and actor.lora.rank=8; "
            "expected auto or local",
        ),
        (
            "actor.megatron.context_parallel_size=2 actor.num_ranks=2 actor.lora.rank=8 trainer.device=cuda",
            "actor.megatron.context_parallel_size=2: on GPUs it needs Transformer Engine's layers, and "
            "actor.lora.rank=8 needs local layers; expected 1",
        ),
        (
            "ref.megatron.context_parallel_size=2 ref.num_ranks=2 ref.megatron.transformer_impl=local "
            "trainer.device=cuda actor.use_kl_loss=true",
            "ref.megatron.context_parallel_size=2: on GPUs it needs Transformer Engine's layers, and "
            "ref.megatron.transformer_impl=local means local layers; expected 1",
        ),
        (
            f"{DENSE[:-1]},model_type:gpt_oss}} trainer.device=cuda trainer.n_gpus_per_node=2 rollout.engine=sglang "
            "actor.megatron.context_parallel_size=2 actor.num_ranks=2",
            "actor.megatron.context_parallel_size=2: on GPUs it does not go with attention sinks; expected 1",
        ),
        (
            "actor.megatron.recompute_granularity=full",
            "actor.megatron.recompute_granularity=full: expected recompute_method=uniform or block, and "
            "recompute_num_laye",
        ),
        (
            "actor.megatron.recompute_granularity=selective actor.megatron.recompute_num_layers=1",
            "actor.megatron.recompute_num_layers=1: belongs to recompute_granularity=full; expected null, or full",
        ),
        ("actor.megatron.recompute_method=block", "actor.megatron.recompute_method=block: belongs to recompute_granul"),
        ("actor.megatron.recompute_granularity=half", "expected one of selective, full"),
        ("actor.megatron.recompute_method=half", "expected one of uniform, block"),
        (
            "actor.megatron.overlap_param_gather=true",
            "actor.megatron.overlap_param_gather=true: only the distributed optimizer gathers parameters; expected "
            "use_dis",
        ),
        (
            "actor.megatron.overlap_param_gather=true actor.megatron.use_distributed_optimizer=true actor.lora.rank=4",
            "actor.megatron.overlap_param_gather=true: actor.lora.rank=4 reads parameters past Megatron's hooks",
        ),
        (
            "actor.optim.name=muon actor.megatron.use_distributed_optimizer=true",
            "actor.megatron.use_distributed_optimizer=true: Megatron shards adamw only; expected false with muon",
        ),
        ("actor.optim.name=muon actor.lora.rank=4", "actor.optim.name=muon: actor.lora.rank=4 trains thin matrices"),
        (
            "critic.optim.name=muon critic.strategy=fsdp",
            "critic.strategy=fsdp: it shards adamw only, not critic.optim.name=muon; expected megatron",
        ),
        ("actor.strategy=fsdp actor.lora.rank=4", "actor.strategy=fsdp: actor.lora.rank=4 trains adapters only"),
        (
            "actor.num_ranks=1 actor.strategy=none actor.megatron.use_distributed_optimizer=true",
            "actor.megatron.use_distributed_optimizer=true: actor.strategy=none is one rank without a wrapper; "
            "expected fa",
        ),
        (
            "actor.use_kl_loss=true actor.kl_loss_type=full ref.first_rank=4",
            "ref.num_ranks=4 with actor.kl_loss_type=full: both models run on the same ranks for it; expected "
            "actor.num_ra",
        ),
        (
            "actor.use_kl_loss=true actor.kl_loss_type=full ref.strategy=fsdp",
            "ref.strategy=fsdp with actor.kl_loss_type=full: both models run on the same ranks for it; expected "
            "actor.stra",
        ),
    ],
)
def test_choices_that_do_not_go_together_are_refused(typed: str, told: str) -> None:
    assert told in refusal(*ON_8, *typed.split())


def test_choices_that_change_no_result_are_taken() -> None:
    config = load(
        *ON_8, DENSE, TP2, "actor.megatron.pipeline_model_parallel_size=2",
        "actor.megatron.sequence_parallel=true", "actor.megatron.recompute_granularity=full",
        "actor.megatron.recompute_method=uniform", "actor.megatron.recompute_num_layers=3",
        "actor.megatron.use_distributed_optimizer=true", "actor.megatron.overlap_grad_reduce=true",
        "actor.megatron.overlap_param_gather=true", "actor.megatron.param_offload=true",
        "actor.megatron.optimizer_offload=true", "actor.megatron.transformer_impl=local",
    )  # fmt: skip
    assert config.critic.megatron.recompute_method == "uniform", "the critic follows"
    assert load(*ON_8, "actor.use_kl_loss=true", "actor.kl_loss_type=full", TP2).ref.megatron


def test_deepep_is_taken_for_experts_on_several_ranks_and_the_reference_follows() -> None:
    words = ("actor.megatron.moe_token_dispatcher_type=flex", "actor.megatron.expert_model_parallel_size=2")
    config = load(*ON_8, EXPERTS, *words, "model.dtype=bfloat16")
    assert config.ref.megatron.moe_token_dispatcher_type == "flex"


def test_where_nothing_can_be_sharded_fsdp_is_megatron() -> None:
    config, warnings = load_config([*BASE, "trainer.n_gpus_per_node=2", TP2, "critic.strategy=fsdp"])
    assert config.critic.strategy == "megatron"
    assert warnings == ["critic.strategy=fsdp: no two ranks share a parameter that could be sharded; runs as megatron"]
    assert load(*ON_8, "actor.megatron.context_parallel_size=8", "actor.strategy=fsdp").critic.strategy == "fsdp"


def test_momentum_is_that_of_the_optimizer_unless_set() -> None:
    assert load("actor.optim.name=muon").actor.optim.momentum == 0.95
    assert load("actor.optim.name=sgd").actor.optim.momentum == 0.0
    assert load("actor.optim.name=muon", "actor.optim.momentum=0.5").actor.optim.momentum == 0.5


# ---- typed keys that would do nothing


def test_experts_that_lie_over_fewer_ranks_than_the_rest_have_copies() -> None:
    layout = ["tensor_model_parallel_size=4", "expert_model_parallel_size=2", "expert_tensor_parallel_size=1"]
    words = [f"actor.megatron.{word}" for word in (*layout, "sequence_parallel=true", "overlap_grad_reduce=true")]
    assert load(EXPERTS, *words, "trainer.n_gpus_per_node=4").actor.megatron.overlap_grad_reduce


@pytest.mark.parametrize(
    ("typed", "because"),
    [
        ("ref.megatron.recompute_granularity=selective actor.use_kl_loss=true", "a reference is not trained"),
        ("ref.megatron.optimizer_offload=true actor.use_kl_loss=true", "a reference is not trained"),
        ("ref.megatron.overlap_grad_reduce=true actor.use_kl_loss=true", "a reference is not trained"),
        ("ref.megatron.use_distributed_optimizer=true actor.use_kl_loss=true", "a reference is not trained"),
        (
            "actor.megatron.use_distributed_optimizer=true actor.strategy=fsdp trainer.n_gpus_per_node=2",
            "actor.strategy=fsdp shards everything, and overlaps always",
        ),
        ("actor.megatron.overlap_grad_reduce=true", "there is one copy of the actor, so nothing is reduced"),
        (
            "actor.megatron.overlap_grad_reduce=true trainer.n_gpus_per_node=4 "
            "actor.megatron.tensor_model_parallel_size=4",
            "there is one copy of the actor, so nothing is reduced",
        ),
        ("critic.num_ranks=1 algorithm.adv_estimator=grpo rollout.n=2", "algorithm.adv_estimator=grpo needs no critic"),
        ("actor.optim.momentum=0.5", "actor.optim.name=adamw has no momentum"),
        ("trainer.master_addr=here", "trainer.nnodes=1"),
        ("trainer.master_port=5", "trainer.nnodes=1"),
    ],
)
def test_a_typed_key_that_would_do_nothing_is_refused(typed: str, because: str) -> None:
    assert refusal(*typed.split()).startswith(f"{typed.split()[0]}: has no effect, because {because}")
