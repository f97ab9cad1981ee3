"""Arguments of the servers that a plan knows, and those that it names because it does not."""

from dataclasses import replace

import pytest
from plan_jobs import job

from megarl.arch.gpus import find
from megarl.config import load_config
from megarl.plan.from_config import KEY, job_of, read_server_args
from megarl.plan.serving import Server

WORDS = ["model=qwen3_8b", "layout=8x80", "rollout.engine=sglang"]


def planned(*args):
    config, _ = load_config([*WORDS, f"rollout.sglang.args=[{','.join(args)}]"], command="config")
    return job_of(config, find("h100"))


@pytest.mark.parametrize(
    ("args", "changes"),
    [
        (["--mem-fraction-static", "0.8"], {"memory_fraction": 0.8}),
        (["--mem-fraction-static=0.8", "--log-level=debug"], {"memory_fraction": 0.8}),
        (["--max-running-requests", "64", "--max-running-requests", "32"], {"max_running": 32}),
        (["--max-total-tokens", "100000"], {"max_total_tokens": 100_000}),
        (["--kv-cache-dtype", "fp8_e5m2"], {"cache_width": 1}),
        (["--kv-cache-dtype", "auto"], {"cache_width": 2}),
        (["--quantization", "awq"], {"not_modelled": (f"{KEY}=--quantization awq",)}),
        (
            ["--enable-torch-compile", "--cuda-graph-bs", "1", "2", "--context-length=4096"],
            {
                "not_modelled": (
                    f"{KEY}=--enable-torch-compile",
                    f"{KEY}=--cuda-graph-bs 1 2",
                    f"{KEY}=--context-length 4096",
                )
            },
        ),
        ([], {}),
    ],
)
def test_an_argument_changes_the_plan_or_is_named(args, changes):
    assert read_server_args(args) == {"not_modelled": ()} | changes


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["--mem-fraction-static", "80"], "--mem-fraction-static 80: expected a share between 0 and 1"),
        (["--max-running-requests", "many"], "--max-running-requests many: expected a whole number of at least 1"),
        (["--max-total-tokens"], "--max-total-tokens : expected a whole number of at least 1"),
    ],
)
def test_a_value_that_the_server_would_refuse_is_refused(args, sentence):
    with pytest.raises(ValueError, match=f"^rollout.sglang.args={sentence}"):
        read_server_args(args)


def test_a_configuration_is_read():
    job = planned("--mem-fraction-static", "0.4", "--enable-torch-compile")
    assert (job.memory_fraction, job.not_modelled) == (0.4, (f"{KEY}=--enable-torch-compile",))
    assert planned().not_modelled == ()
    words = [*WORDS[:2], "rollout.engine=hf", "rollout.placement=separate"]  # it has no such arguments
    assert job_of(load_config(words, command="config")[0], find("h100")).not_modelled == ()


@pytest.mark.parametrize(
    ("words", "fields", "named"),
    [
        (["rollout.ahead=2", "rollout.update=drain"], {"ahead": 2, "drains": True}, []),
        (["rollout.ahead=2", "rollout.update=retract"], {"ahead": 2, "drains": False}, ["rollout.update=retract"]),
        (["rollout.turn_s=30"], {"ahead": 1, "turn_s": 30.0, "drains": False}, ["rollout.turn_s=30"]),
        (["rollout.max_in_flight=64"], {"max_in_flight": 64, "turn_s": None}, []),
        (["algorithm.filter_groups.enable=true"], {}, ["algorithm.filter_groups.refill=true"]),
        (["algorithm.filter_groups.enable=true", "algorithm.filter_groups.refill=false"], {}, []),
    ],
)
def test_a_key_of_the_schedule_changes_the_plan_or_is_named(words, fields, named):
    apart = ["rollout.placement=separate", "trainer.nnodes=2"] if "rollout.ahead=2" in words else []
    config, _ = load_config(["recipe=grpo_qwen2_5_7b_1x8h100", *apart, *words], command="config")
    job = job_of(config, find("h100"))
    assert {name: getattr(job, name) for name in fields} == fields
    assert [each.partition(":")[0] for each in job.not_modelled] == named


def test_a_narrow_cache_holds_twice_as_much():
    wide, narrow = (Server(job(cache_width=width)) for width in (2, 1))
    assert narrow.token_bytes == wide.token_bytes / 2 and narrow.room == 2 * wide.room
    assert narrow.cache_bytes == wide.cache_bytes


def test_a_cache_ends_at_its_tokens():
    server = Server(job(max_total_tokens=1000))
    assert server.cache_bytes == 1000 * server.token_bytes < Server(job()).cache_bytes
    tiny = job(max_total_tokens=10**9)
    assert Server(tiny).cache_bytes == Server(replace(tiny, max_total_tokens=None)).cache_bytes
