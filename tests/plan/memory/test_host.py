"""Host memory of a machine: offloaded roles, and copies of checkpoints that are being written."""

from dataclasses import replace

from plan_jobs import GPU, HF, job

from megarl.layout import Layout
from megarl.plan.job import Role
from megarl.plan.memory.count import whole
from megarl.plan.memory.gpu_budget import fullest, gpu_budgets
from megarl.plan.memory.host import host_budget, saved_bytes
from megarl.plan.predict import predict

CRITIC = Role("critic", HF, Layout(), 4, max_tokens=100, log_prob_tokens=100)


def test_a_checkpoint_has_weights_master_weights_and_moments():
    actor = job().actor
    assert saved_bytes(actor) == whole(HF) * (2 + 4 + 8)
    assert saved_bytes(replace(actor, dtype="float32")) == whole(HF) * (4 + 8)
    assert saved_bytes(replace(actor, optimizer="sgd")) == whole(HF) * (2 + 4 + 4)
    # A matrix [out, in] has adapters of rank * (out + in): per layer q and o 32 each, k and v 24, gate, up, down 48.
    assert saved_bytes(replace(actor, lora_rank=8)) == 4 * 8 * (2 * 32 + 2 * 24 + 3 * 48) * 14


def test_copies_are_the_share_of_a_machine():
    own = job(num_ranks=16, gpus_per_node=8, shared=False, async_save=True)
    assert host_budget(own) == {"save_copies": whole(HF) * 14 // 2, "total": whole(HF) * 14 // 2}
    assert host_budget(replace(own, async_save=False)) == {"total": 0}
    small = replace(own, num_ranks=4)
    assert host_budget(small)["save_copies"] == whole(HF) * 14


def test_every_role_that_is_offloaded_counts_on_each_rank():
    own = job(num_ranks=4, shared=True, critic=CRITIC)
    actor, critic = fullest(own.actor), fullest(CRITIC)
    assert host_budget(own) == {
        "weights": 4 * (actor.weights + critic.weights),
        "optimizer": 4 * (actor.optimizer + critic.optimizer),
        "total": 4 * (actor.weights + critic.weights + actor.optimizer + critic.optimizer),
    }
    apart = replace(own, shared=False, critic=replace(CRITIC, optimizer_offload=True, first_rank=4))
    assert host_budget(apart) == {"optimizer": 4 * critic.optimizer, "total": 4 * critic.optimizer}
    beside = replace(apart, param_offload=True, gpus_per_node=8)
    both = {"weights": 4 * actor.weights, "optimizer": 4 * critic.optimizer}
    assert host_budget(beside) == both | {"total": sum(both.values())}, "on other GPUs of the same machine"
    assert host_budget(replace(beside, gpus_per_node=4))["total"] == max(both.values())


def test_adam_on_the_host_has_its_moments_a_copy_and_gradients_there():
    own = job(num_ranks=4, shared=False)
    there = replace(own, optimizer_on_host=True)
    learnt = fullest(own.actor).optimizer // 12  # a float32 copy and two moments of each parameter
    assert fullest(there.actor).optimizer == 4 * learnt, "the copy stays on the GPU"
    assert host_budget(there) == {"optimizer": 4 * 16 * learnt, "total": 4 * 16 * learnt}
    assert saved_bytes(there.actor) == saved_bytes(own.actor)
    taught = replace(own, lora_rank=8), replace(there, lora_rank=8)
    assert fullest(taught[0].actor).optimizer == 3 * fullest(taught[1].actor).optimizer


def test_a_save_needs_no_gradients_and_gathers_only_with_fsdp():
    own = job(param_offload=True, optimizer_offload=True)
    found = gpu_budgets(own)["save"]
    held = fullest(own.actor)
    assert found == {
        "weights": held.weights, "optimizer": held.optimizer, "reserve": held.reserve,
        "total": held.weights + held.optimizer + held.reserve,
    }  # fmt: skip
    fsdp = job(num_ranks=2, fsdp=True, layout=Layout(use_distributed_optimizer=True))
    assert gpu_budgets(fsdp)["save"]["gathered"] == 2 * whole(HF)


def test_host_memory_is_compared_where_it_is_known():
    own = job(num_ranks=8, async_save=True, gpu=replace(GPU, memory_bytes=10**11))
    assert predict(own).fits
    found = predict(replace(own, gpu=replace(own.gpu, host_bytes=10**6)))
    assert not found.fits
    assert any(line.startswith("host: 0 GB of the 0 of a machine, most of it ") for line in found.why)
