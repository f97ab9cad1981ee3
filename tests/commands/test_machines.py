"""What machines a run wants, counted from its settings."""

import pytest
from config_helpers import load

from megarl.commands.machines import CPUS_PER_GPU, Machines, machines_of


def machines(*words: str, layout: str | None = None) -> Machines:
    return machines_of(load(*words), layout)


def test_of_a_recipe_all_places_of_a_run_on_gpus_are_known() -> None:
    found = machines("recipe=grpo_qwen2_5_72b_8x8h100", "trainer.spare_nodes=1", layout="64x80")
    assert found == Machines(8, 1, 0, 8, "h100", 8 * CPUS_PER_GPU, found.memory_gb)
    assert found.memory_gb is not None and found.memory_gb > 2 * 73 / 8, "the machine's share of the weights"


def test_a_run_on_cpus_wants_a_core_for_each_rank() -> None:
    assert machines("recipe=quickstart", "trainer.n_gpus_per_node=3") == Machines(1, 0, 0, 0, None, 3, None)


def test_servers_beside_the_ranks_want_gpus_of_their_own() -> None:
    words = ("recipe=grpo_llama3_8b_1x8h100", "rollout.placement=separate", "rollout.tensor_model_parallel_size=2")
    assert machines(*words, "rollout.num_servers=3").gpus == 8 + 3 * 2
    assert machines(*words, "rollout.num_servers=3", "rollout.first_gpu=10").gpus == 10 + 3 * 2


@pytest.mark.parametrize(("hosts", "wanted"), [("a:1,https://a:2", 1), ("a:1,https://b:1", 2)])
def test_hosts_of_servers_that_run_elsewhere_are_machines_of_their_own(hosts: str, wanted: int) -> None:
    words = ("recipe=grpo_llama3_8b_1x8h100", "rollout.placement=separate")
    found = machines(*words, f"rollout.urls=[https://{hosts}]")
    assert (found.nodes, found.servers, found.gpus) == (1, wanted, 8)
