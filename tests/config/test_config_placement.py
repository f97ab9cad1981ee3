"""Where servers and the actor stand."""

from __future__ import annotations

from config_helpers import load

from megarl.config.placement import gpu_seats

SHARED = ["rollout.engine=sglang", "rollout.placement=shared", "trainer.device=cuda", "trainer.n_gpus_per_node=4"]


def test_gpus_are_named_by_machine_and_number_of_servers_on_one_machine_each() -> None:
    sizes = ["trainer.nnodes=2", "rollout.tensor_model_parallel_size=2", "rollout.num_servers=4"]
    assert gpu_seats(load(*SHARED, *sizes), ["a", "b", "c", "d"]) == {
        "trainer": ["0/0", "0/1", "0/2", "0/3", "1/0", "1/1", "1/2", "1/3"],
        "servers": {"a": ["0/0", "0/1"], "b": ["0/2", "0/3"], "c": ["1/0", "1/1"], "d": ["1/2", "1/3"]},
    }


def test_gpus_of_a_server_over_several_machines_are_named_by_each() -> None:
    config = load(*SHARED, "trainer.nnodes=2", "rollout.tensor_model_parallel_size=8")
    seats = gpu_seats(config, ["a"])
    assert seats is not None
    assert seats["servers"]["a"] == seats["trainer"] == [f"{machine}/{gpu}" for machine in (0, 1) for gpu in range(4)]


def test_servers_beside_the_trainer_are_not_taken_for_the_next_machine() -> None:
    config = load("rollout.engine=sglang", "trainer.n_gpus_per_node=4", "trainer.nnodes=2", "rollout.num_servers=2")
    seats = gpu_seats(config, ["a", "b"])
    assert seats is not None
    assert seats["servers"] == {"a": ["0/4"], "b": ["1/4"]}


def test_an_actor_on_later_gpus_is_named_by_these() -> None:
    seats = gpu_seats(load(*SHARED, "actor.first_rank=2", "actor.num_ranks=2"), ["a"])
    assert seats == {"trainer": ["0/2", "0/3"], "servers": {"a": ["0/0"]}}
