"""configs/model: every layout of every preset can be, and fits on the GPUs that it is named by."""

from math import isfinite

import pytest
from preset_files import MINIS, NAMES, PUBLISHED, cases_of, content_of, hf_of

from megarl.arch.gpus import of_memory
from megarl.arch.layout import misfits, numbers_of, rank_misfits
from megarl.arch.settings.families import SETTINGS
from megarl.config import load_config
from megarl.plan.from_config import job_of
from megarl.plan.predict import STAGES, predict
from megarl.weights.count import whole
from megarl.weights.mapping.families import FAMILIES

CACHE_BYTES = 8 * 10**9  # the least that a server wants beside its weights
DATA = "data.train_files=[train.jsonl]"


def test_every_family_has_a_small_model():
    assert {hf_of(name)["model_type"] for name in MINIS} == set(FAMILIES)


@pytest.mark.parametrize("name", NAMES)
def test_megatron_knows_the_model_and_every_layout_suits_it_and_its_ranks(name):
    hf = hf_of(name)
    assert SETTINGS[hf["model_type"]](hf)
    for case in cases_of(name):
        wrong = [*misfits(numbers_of(hf_of(name)), case.layout), *rank_misfits(case.layout, case.num_ranks)]
        assert not wrong, f"{name} {case.name}: {wrong}"


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_layout_is_named_by_its_gpus_all_of_which_serve(name):
    for case in cases_of(name):
        gpus, memory = (int(part) for part in case.name.split("x"))
        rollout = case.content["rollout"]
        size = rollout.get("tensor_model_parallel_size", 1)
        assert case.num_ranks == gpus == rollout["num_servers"] * size
        weights = 2 * whole(hf_of(name)) / size
        room = rollout["memory_fraction"] * memory * 10**9
        assert weights + CACHE_BYTES < room, f"{name} {case.name}: no room for a server's KV cache"


@pytest.mark.parametrize("name", PUBLISHED)
def test_layouts_grow_up_to_hundreds_of_gpus_and_tensor_parallelism_stays_within_a_machine(name):
    for case in cases_of(name):
        assert case.layout.tp <= case.content["trainer"]["n_gpus_per_node"] <= 8
    sizes = {tuple(int(part) for part in case.name.split("x")) for case in cases_of(name)}
    for memory in (80, 141):
        for gpus in (64, 256):
            assert {(gpus, memory)} <= sizes or whole(hf_of(name)) * 18 > gpus * memory * 10**9 * 0.8


@pytest.mark.parametrize("name", MINIS)
def test_a_mini_is_small(name):
    assert whole(hf_of(name)) < 10**6
    assert [case.name for case in cases_of(name)] == ["1xcpu", "2xcpu", "4xcpu", "8xcpu"]


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_composes_with_its_smallest_layout(name):
    case = cases_of(name)[0]
    config, warnings = load_config([*case.words, DATA], command="train")
    assert not warnings
    assert config.model.path == content_of(name)["model"]["path"]
    assert config.model.config == content_of(name)["model"]["config"]
    assert config.trainer.num_ranks == case.num_ranks
    assert config.actor.megatron.tensor_model_parallel_size == case.layout.tp
    assert config.critic.megatron.pipeline_model_parallel_size == case.layout.pp
    if name in PUBLISHED:
        assert_fits(case, config)


@pytest.mark.full
@pytest.mark.parametrize("name", PUBLISHED)
def test_every_layout_fits_as_it_is_composed(name):
    for case in cases_of(name):
        assert_fits(case, load_config([*case.words, DATA], command="train")[0])


def assert_fits(case, config):
    """With everything that a configuration has of its own: offload, micro-batches, lengths, a critic."""
    job = job_of(config, of_memory(int(case.name.split("x")[1])))
    found = predict(job)
    assert job.critic and job.num_gpus == case.num_ranks
    assert found.fits, f"{case.preset} {case.name}: {found.why[0]}"
    assert set(found.stages) == set(STAGES) - {"teachers", "ref", "old_log_prob"}  # the first step gives these
    assert all(isfinite(seconds) and seconds > 0 for seconds in found.stages.values())
    assert 0 < found.mfu_step < found.mfu < 1, f"{case.preset} {case.name}"
    assert found.bubble == pytest.approx((case.layout.pp - 1) / (found.micro_batches * case.layout.vpp))
    assert found.tokens_per_s_per_gpu == pytest.approx(job.tokens / found.step_s / job.num_gpus)
