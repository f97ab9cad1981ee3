import pytest

from megarl.metrics import Timer


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.now += seconds


def test_stages_add_up_nest_and_leave_a_rest():
    clock, seen = Clock(), []
    timer = Timer(on_stage=seen.append, clock=clock)
    clock.wait(50)  # before the first step
    timer.start()
    with timer("gen"):
        clock.wait(2)
        with timer("reward"):
            clock.wait(1)
    with timer("update_actor"):
        clock.wait(4)
    with timer("gen"):
        clock.wait(1)
    clock.wait(2)
    assert timer.finish(num_tokens=400, num_devices=2) == pytest.approx(
        {
            "timing_s/gen": 4,
            "timing_s/reward": 1,
            "timing_s/update_actor": 4,
            "timing_s/step": 10,
            "perf/total_num_tokens": 400,
            "perf/time_per_step": 10,
            "perf/throughput": 20,
            "perf/unaccounted": 0.2,
        }
    )
    assert seen == ["gen", "reward", "update_actor", "gen"]
    clock.wait(1)
    assert timer.finish(num_tokens=0) == {
        "timing_s/step": 1,
        "perf/total_num_tokens": 0,
        "perf/time_per_step": 1,
        "perf/throughput": 0,
        "perf/unaccounted": 1,
    }


def test_the_end_of_a_stage_may_belong_to_another_one():
    clock = Clock()
    timer = Timer(clock=clock)
    for seconds in (1, 2):
        with timer("gen"):
            clock.wait(4)
        assert timer.split("gen", "reward", seconds) == seconds
    with timer("gen"):
        clock.wait(1)
    assert timer.split("gen", "reward", 9) == 1, "it had no more"
    assert [stage[:3] for stage in timer.stages[:2]] == [("gen", 0, 3), ("reward", 3, 1)]
    found = timer.finish(num_tokens=1)
    assert (found["timing_s/gen"], found["timing_s/reward"], found["perf/unaccounted"]) == (5, 4, 0)


def test_a_stage_that_raises_is_timed_and_closed():
    clock = Clock()
    timer = Timer(clock=clock)
    with pytest.raises(KeyError), timer("gen"):
        clock.wait(3)
        raise KeyError
    assert timer.finish(num_tokens=1)["timing_s/gen"] == 3


def test_finishing_inside_a_stage_is_our_own_mistake():
    timer = Timer()
    with pytest.raises(AssertionError), timer("gen"):
        timer.finish(num_tokens=1)
