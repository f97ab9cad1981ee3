"""Better layouts: all that are tried can be, and what is proposed fits, is faster, and passes every check."""

import json
import re
from dataclasses import replace

import pytest
from plan_jobs import changed
from preset_files import hf_of

from megarl.arch.gpus import find
from megarl.arch.layout import KEYS, Layout, misfits, numbers_of, rank_misfits, training_misfits
from megarl.config import load_config
from megarl.plan.from_config import job_of
from megarl.plan.gpu_budget import gpu_budgets_of_trainer
from megarl.plan.job import Job, Role
from megarl.plan.predict import predict
from megarl.plan.search import _with, layouts, reason, search, seconds_text, servers_of, variants, words_of


def run(preset, num_ranks, **changes):
    actor = Role(
        "actor", hf_of(preset), Layout(), num_ranks, recompute="full", overlap_grad_reduce=True, param_offload=True,
        optimizer_offload=True,
    )  # fmt: skip
    sizes = {"prompts": 512, "n": 16, "mini_batch": 128, "longest": 8192}
    return changed(Job(find("h100"), actor, **sizes, num_servers=num_ranks // 8, server_gpus=8), **changes)


@pytest.mark.parametrize(
    ("preset", "ranks"),
    [("qwen2_5_72b", 64), ("qwen3_30b_a3b", 32), ("deepseek_v3_671b", 512), ("nemotron3_nano_30b_a3b", 32)],
)
def test_layouts_that_are_tried_can_be(preset, ranks):
    job = run(preset, ranks)
    found = list(layouts(job))
    assert len(set(found)) == len(found) > 20
    for layout in found:
        numbers = numbers_of(job.actor.hf)
        assert not [*misfits(numbers, layout), *rank_misfits(layout, ranks), *training_misfits(numbers, layout)]
        assert layout.tp <= job.gpus_per_node


def test_stages_are_as_even_as_they_can_be():
    found = {layout.pp: layout for layout in layouts(run("deepseek_v3_671b", 512)) if layout.vpp == 1}
    assert sorted(found[4].stage_layers(61)) == [15, 15, 15, 16]
    assert max(found[8].stage_layers(61)) == 8


def test_stages_begin_with_layers_that_choose_their_own_keys():
    """In GLM-5.2 one of four does, so that stages are as even as that lets them be."""
    found = {layout.pp: layout.stage_layers(78) for layout in layouts(run("glm5_2_743b", 512))}
    assert (found[2], found[4], found[8]) == ([38, 40], [18, 20, 20, 20], [2, *[12] * 6, 4])


def test_short_sequences_are_not_shared():
    assert {layout.cp for layout in layouts(run("qwen3_8b", 8, longest=2048))} == {1}
    assert {layout.pp for layout in layouts(run("qwen3_8b", 8, fsdp=True))} == {1}


def with_modules(*words: str) -> tuple[list[str], Job]:
    """The words of a run that computes modules again, and the run."""
    given = "{recompute_modules:[moe_act,layernorm],batch_p2p_sync:false}"
    whole = ["recipe=grpo_qwen3_30b_a3b_4x8h100", "actor.megatron.recompute_granularity=selective"]
    whole += [f"actor.megatron.recompute_{key}=null" for key in ("method", "num_layers")]
    whole += [f"actor.megatron.override_transformer_config={given}", *words]
    return whole, job_of(load_config(whole, command="config")[0], find("h100"))


def test_modules_that_a_run_computes_again_are_one_way_of_three() -> None:
    words, job = with_modules()
    assert job.actor.recompute_modules == ("moe_act", "layernorm")
    assert [way.recompute for way in variants(job.actor, job.longest)][:3] == ["none", "selective", "full"]
    budgets = {how: gpu_budgets_of_trainer(changed(job, recompute=how))["actor"] for how in ("none", "selective")}
    for key in ("total", "activations"):
        assert budgets["selective"][key] < budgets["none"][key]
    for how in ("none", "full"):
        config, _ = load_config([*words, *words_of(job, changed(job, recompute=how))], command="config")
        typed = job_of(config, find("h100"))
        assert (typed.actor.recompute, typed.actor.recompute_modules) == (how, ())
        fields = {name: value for name, value in config.actor.megatron.override_transformer_config.items() if value}
        assert config.actor.megatron.override_transformer_config["batch_p2p_sync"] is False and not fields


def test_a_critic_follows_the_actor_only_in_what_it_computes_again_as_the_actor_does() -> None:
    full = [f"critic.megatron.recompute_{key}" for key in ("granularity=full", "method=uniform", "num_layers=1")]
    for own, expected in (([], "none"), (full, "full")):
        _, job = with_modules("algorithm.adv_estimator=gae", *own)
        other = _with(job, replace(job.actor, recompute="none", layout=replace(job.actor.layout, vpp=2)))
        assert other.critic and (other.critic.recompute, other.critic.layout.vpp) == (expected, 2)


def test_a_critic_that_keeps_what_the_actor_computes_again_is_planned_so() -> None:
    """With method=block most layers are kept."""
    block = [f"critic.megatron.recompute_{key}" for key in ("granularity=full", "method=block", "num_layers=4")]
    (_, follows), (_, own) = (with_modules("algorithm.adv_estimator=gae", *words) for words in ([], block))
    assert follows.critic and own.critic and follows.critic.recompute_modules == ("moe_act", "layernorm")
    assert own.critic.recompute_modules == ()
    kept = gpu_budgets_of_trainer(replace(follows, critic=replace(follows.critic, recompute="none")))["critic"]
    less, same = (gpu_budgets_of_trainer(run)["critic"]["activations"] for run in (follows, own))
    assert less < same == kept["activations"]


def test_servers_that_are_tried_take_as_many_gpus():
    job = run("qwen3_235b_a22b", 64)
    found = list(servers_of(job))
    assert len({(one.server_gpus, one.attention_dp) for one in found}) == len(found)
    assert {(one.server_gpus, one.server_ep) for one in found} >= {(4, 1), (8, 1), (16, 1)}
    dealt = [(one.server_gpus, one.server_ep) for one in servers_of(replace(job, server_ep=8))]
    assert set(dealt) >= {(4, 4), (8, 8), (16, 16)}
    assert {one.server_gpus * one.num_servers for one in found} == {64}
    apart = {one.server_gpus for one in servers_of(replace(job, shared=False))}
    assert max(apart) == 8


def test_attention_groups_are_tried_where_sglang_has_them():
    groups = {one.attention_dp for one in servers_of(run("deepseek_v3_671b", 64)) if one.server_gpus == 16}
    assert groups == {1, 2, 4, 8, 16}
    assert {one.attention_dp for one in servers_of(run("qwen3_8b", 8))} == {1}  # neither experts nor a latent
    assert {one.attention_dp for one in servers_of(run("mixtral_8x7b", 8))} == {1}


def test_a_latent_cache_is_a_reason_for_attention_groups():
    slow = run("deepseek_v3_671b", 512, gpu=find("h200"), layout=Layout(
        pp=4, cp=2, ep=32, etp=1, first_stage_layers=16, last_stage_layers=15, use_distributed_optimizer=True,
    ), num_servers=32, server_gpus=16, server_ep=16)  # fmt: skip
    groups = replace(slow, attention_dp=4)
    assert predict(groups).stages["gen"] < 0.9 * predict(slow).stages["gen"]
    assert words_of(slow, groups) == ["rollout.attention_dp=4"]
    assert "in 4 attention groups" in reason(slow, predict(slow), groups, predict(groups))


def composed_of(job):
    """What `load_config` makes of words, for the few that a search types."""
    fields = {f"actor.megatron.{key}": field for field, key in KEYS.items()}
    names = {
        "actor.ppo_max_token_len_per_gpu": "max_tokens", "rollout.tensor_model_parallel_size": "server_gpus",
        "rollout.expert_parallel_size": "server_ep", "rollout.num_servers": "num_servers",
        "rollout.attention_dp": "attention_dp",
    }  # fmt: skip

    def composed(words):
        layout, own = {}, {}
        for key, text in (word.split("=") for word in words):
            value = json.loads(text) if text != "full" and text != "uniform" else text
            if key in fields:
                layout[fields[key]] = value
            elif key in names:
                own[names[key]] = value
            elif key == "actor.megatron.recompute_granularity":
                own["recompute"] = value or "none"
        own["log_prob_tokens"] = own.get("max_tokens", job.actor.max_tokens)
        return changed(job, layout=replace(job.actor.layout, **layout), **own)

    return composed


def test_words_say_what_differs():
    job = run("qwen3_8b", 8)
    layout = replace(job.actor.layout, tp=2, sequence_parallel=True, ep=4)
    other = changed(job, layout=layout, recompute="none", server_gpus=4, max_tokens=32768, log_prob_tokens=32768)
    words = words_of(job, other)
    assert words == [
        "actor.megatron.tensor_model_parallel_size=2",
        "actor.megatron.sequence_parallel=true",
        "actor.megatron.expert_model_parallel_size=4",
        "actor.megatron.recompute_granularity=null",
        "actor.megatron.recompute_method=null",
        "actor.megatron.recompute_num_layers=null",
        "actor.ppo_max_token_len_per_gpu=32768",
        "rollout.tensor_model_parallel_size=4",
    ]
    assert composed_of(job)(words) == other
    assert words_of(job, job) == []


def test_a_wasteful_run_is_told_a_faster_one():
    slow = run("qwen3_8b", 8, layout=Layout(tp=8, sequence_parallel=True, use_distributed_optimizer=True))
    best = search(slow, composed_of(slow))[0]
    assert predict(slow).fits and best.prediction.fits
    assert best.prediction.step_s < predict(slow).step_s
    assert best.job.actor.layout.tp < 8
    assert "communication that nothing hides" in best.why and " -> " in best.why


def test_what_cannot_be_composed_is_not_proposed():
    assert search(run("qwen3_8b", 8), lambda words: None) == []


def test_a_run_that_does_not_fit_is_told_one_that_does():
    large = run("qwen2_5_32b", 8, gpu=find("h200"))
    assert not predict(large).fits
    best = search(large, composed_of(large))[0]
    assert best.prediction.fits
    assert best.why.startswith("it fits, and the run as it is does not: actor")


@pytest.mark.parametrize(
    "typed", ["actor.megatron.recompute_granularity", "actor.megatron.override_transformer_config"]
)
def test_what_was_typed_stays_and_the_best_of_the_rest_is_proposed(typed: str) -> None:
    own = run("qwen3_8b", 8, recompute="selective", recompute_modules=("mlp",))
    free, kept = (search(own, composed_of(own), keys) for keys in ((), {typed, "rollout.attention_dp"}))
    assert not predict(own).fits and "actor.megatron.recompute_granularity=null" in free[0].words
    assert kept and not any("recompute" in word for one in kept for word in one.words)


def test_a_reason_names_causes_of_the_stages_that_it_lists_only():
    slow = run("qwen3_8b", 8, layout=Layout(tp=8, sequence_parallel=True, use_distributed_optimizer=True))
    servers = replace(slow, server_gpus=1, num_servers=8)
    why = reason(slow, predict(slow), servers, predict(servers))
    cause = r"servers of 1 GPU generate \d+ completions at a time, \d+ ms a token, not \d+ at \d+ ms"
    assert re.fullmatch(rf"gen \d+ -> \d+ s: {cause}", why)
    both = changed(servers, layout=replace(slow.actor.layout, tp=4))
    own, new = (replace(predict(one), stages={"update_actor": seconds}) for one, seconds in ((slow, 99.0), (both, 9.0)))
    assert "servers of" not in reason(slow, own, both, new)
    assert reason(slow, own, both, new).startswith("update_actor 99 -> 9.0 s: communication that nothing hides is ")


def test_small_times_have_a_decimal():
    assert [seconds_text(seconds) for seconds in (0.44, 9.9, 9.96, 1234.5)] == ["0.4", "9.9", "10", "1234"]


@pytest.mark.full
def test_what_is_proposed_for_a_recipe_composes_to_what_was_predicted():
    recipe, gpu = "grpo_mixtral_8x7b_4x8h100", find("h100")

    def composed(words):
        return job_of(load_config([f"recipe={recipe}", *words], command="config")[0], gpu)

    job = composed([])
    found = search(job, composed)
    assert found
    for one in found:
        assert predict(composed(one.words)).step_s == one.prediction.step_s < predict(job).step_s
