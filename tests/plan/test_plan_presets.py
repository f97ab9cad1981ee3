"""Every layout of every preset passes the planner, on the GPUs that it is named by."""

from math import isfinite

import pytest
from preset_files import MINIS, NAMES, PUBLISHED, cases_of, hf_of

from megarl.config import load_config
from megarl.plan import from_config
from megarl.plan.gpus import find, of_memory
from megarl.plan.job import Job, Role
from megarl.plan.predict import STAGES, predict


def made_job(case):
    """A step of PPO with completions of some length; trainer and servers as the layout has them."""
    content = case.content
    megatron, rollout, trainer = content.get("actor", {}).get("megatron", {}), content["rollout"], content["trainer"]
    hf, memory = hf_of(case.preset), case.name.split("x")[1]
    recompute = "full" if case.recomputes else "none"
    offload = {key: megatron.get(key, False) for key in ("param_offload", "optimizer_offload")}
    critic = Role("critic", hf, case.layout, case.num_ranks, recompute=recompute, **offload)
    return Job(
        hf=hf,
        gpu=find("h100") if memory == "cpu" else of_memory(int(memory)),
        layout=case.layout,
        num_ranks=case.num_ranks,
        gpus_per_node=trainer["n_gpus_per_node"],
        prompts=1024,
        mini_batch=256,
        n=16,
        longest=4096,
        recompute=recompute,
        critic=critic,
        reference=Role("ref", hf, case.layout, case.num_ranks, optimizer=None, param_offload=offload["param_offload"]),
        shared=rollout.get("placement") == "shared",
        server_gpus=rollout.get("tensor_model_parallel_size", 1),
        server_ep=rollout.get("expert_parallel_size", 1),
        attention_dp=rollout.get("attention_dp", 1),
        num_servers=rollout.get("num_servers", 1),
        memory_fraction=rollout.get("memory_fraction", 0.5),
        **offload,
    )


@pytest.mark.parametrize("name", NAMES)
def test_every_layout_of_a_preset_fits_and_takes_some_time(name):
    for case in cases_of(name):
        job = made_job(case)
        found = predict(job)
        assert found.fits or name in MINIS, f"{name} {case.name}: {found.why[0]}"
        assert set(found.stages) == set(STAGES) - {"teachers"}
        assert all(isfinite(seconds) and seconds > 0 for seconds in found.stages.values())
        assert 0 < found.mfu_step < found.mfu < 1, f"{name} {case.name}"
        assert found.bubble == pytest.approx((case.layout.pp - 1) / (found.micro_batches * case.layout.vpp))
        assert found.tokens_per_s_per_gpu == pytest.approx(job.tokens / found.step_s / job.num_gpus)


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_smallest_layout_fits_as_it_is_composed(name):
    assert_fits(cases_of(name)[0])


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_every_layout_fits_as_it_is_composed(name):
    for case in cases_of(name):
        assert_fits(case)


def assert_fits(case):
    """With everything that a configuration has of its own: offload, micro-batches, lengths, a critic."""
    config, _ = load_config([*case.words, "data.train_files=[train.jsonl]"], command="train")
    job = from_config.job_of(config, of_memory(int(case.name.split("x")[1])))
    found = predict(job)
    assert job.critic and job.num_gpus == case.num_ranks
    assert found.fits, f"{case.preset} {case.name}: {found.why[0]}"
