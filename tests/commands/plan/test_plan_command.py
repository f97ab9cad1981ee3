"""`megarl plan` at a terminal."""

import io
import json
import re
from dataclasses import replace

import pytest
from plan_jobs import changed
from preset_files import hf_of
from rich.console import Console

from megarl import cli
from megarl.commands.plan.command import Request, check_size, plan_of
from megarl.commands.plan.show import headline, layout_words, show, show_proposals
from megarl.plan.from_config import job_of
from megarl.plan.predict import predict
from megarl.plan.search import Proposal

RECIPE = "recipe=grpo_qwen2_5_72b_8x8h100"


def call(*words):
    return cli.main(["plan", *words])


def test_the_keys_of_json_stand_for_programs(capsys):
    assert call(RECIPE, "--json", "--response-tokens", "2000") == 0
    found = json.loads(capsys.readouterr().out)
    assert {"fits", "memory_gb", "step_s", "tokens_per_s_per_gpu", "mfu", "bubble", "push_s"} <= found.keys()
    assert found["fits"] is True
    assert found["gpu"] == "h100" and found["num_gpus"] == 64
    assert found["parameters"] == 72_706_203_648
    assert found["response_tokens"] == 2000 and found["prompt_tokens"] == 512
    assert found["memory_gb"]["server"]["kv_cache"] > 10
    assert (found["link_gb_s"], found["nic_gbit_s"]) == (450, 400)


def test_both_kinds_of_layers_are_planned(capsys):
    words = ("recipe=grpo_qwen3_32b_8x8h100", "actor.megatron.transformer_impl=auto", "--json")
    words = (*words, "actor.ppo_max_token_len_per_gpu=20000")
    for more in ([], ["actor.megatron.transformer_impl=local"], ["actor.lora.rank=8"]):
        assert call(*words, *more) == 0
    auto, local, adapters = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert auto["fits"] and not auto["fits_local"]
    assert auto["memory_local_gb"] == {"actor": local["memory_gb"]["actor"]["total"]}
    assert not local["fits"] and local["memory_local_gb"] == {} == adapters["memory_local_gb"]


def test_a_search_says_why(capsys):
    assert call(RECIPE, "--search", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["proposals"]
    for proposal in found["proposals"]:
        assert proposal["fits"] and proposal["step_s"] < found["step_s"]
        assert proposal["words"] and proposal["reason"]


def test_a_table_is_80_columns_wide():
    plan = plan_of(Request(settings=["recipe=ppo_llama3_70b_16x8h100"]))
    job = job_of(plan.config, plan.gpu)
    prediction = predict(job)
    console = Console(width=80, record=True, file=io.StringIO())
    show(console, job, prediction, plan.assumed)
    show_proposals(console, prediction, [])
    text = console.export_text()
    for part in (
        "critic",
        "local: GB with local layers",
        "server",
        "cache",
        "update_critic",
        "tokens/s/GPU",
        "bubble",
        "it fits",
        "layout is called",
    ):
        assert part in text
    assert "…" not in text
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 80


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--response-tokens", "9000"], "--response-tokens 9000: expected more than 0, and at most"),
        (["--gpu", "h999"], "gpu=h999: what it can do is not known here"),
        (["--gpus", "12"], "--gpus 12: expected a multiple of the 8 GPUs of a machine"),
        (["--gpus", "128", "trainer.nnodes=32"], "--gpus 128: the configuration comes to 256 GPUs"),
        (["--gpus-per-node", "48"], "--gpus-per-node 48: the trainer's are 64, expected a multiple of the 48 GPUs"),
    ],
)
def test_a_mistake_is_one_sentence(words, sentence, capsys):
    assert call(RECIPE, *words) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"error: {sentence}")
    assert told.count("\n") == 1


SEPARATE = ("model=qwen3_8b", "--gpu", "h100", "--gpus-per-node", "8")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--gpus", "24"], "--gpus 24: the trainer's are 23, expected a multiple of the 8 GPUs of a machine"),
        (["--gpus", "1"], "--gpus 1: servers of their own take 1; expected more than that"),
        (["--gpus", "10", "rollout.urls=[https://a:1,https://b:1]", "rollout.engine=sglang", "trainer.nnodes=9"], ""),
    ],
)
def test_servers_of_their_own_take_gpus_of_the_run(words, sentence, capsys):
    assert call(*SEPARATE, "--json", *words) == (2 if sentence else 0)
    out, told = capsys.readouterr()
    assert told.startswith(f"error: {sentence}") if sentence else json.loads(out)["num_gpus"] == 10
    assert "--gpus-per-node 8 " not in told


def test_gpus_are_those_of_the_whole_run():
    request = Request(gpu="h100", gpus=25, gpus_per_node=8, settings=["model=qwen3_8b"])
    plan = plan_of(request)
    job = job_of(plan.config, plan.gpu)
    assert (job.actor.num_ranks, job.num_gpus) == (24, 25)
    check_size(request, job)
    with pytest.raises(ValueError, match=r"^--gpus 25: the configuration comes to 26 GPUs \(2 x 1 of servers"):
        check_size(request, replace(job, num_servers=2))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"model_type": "gemma2"}, "config.json: model_type 'gemma2' is not supported; expected one of"),
        ({"model_type": None}, "config.json: model_type None is not supported; expected one of"),
    ],
)
def test_a_foreign_model_is_one_sentence(changes, sentence, tmp_path, capsys):
    said = {key: value for key, value in (hf_of("qwen3_mini") | changes).items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(said))
    assert call(f"model.path={tmp_path}", "--gpu", "h100") == 2
    told = capsys.readouterr().err
    assert told.startswith(f"error: {sentence}") and told.count("\n") == 1


def test_links_of_the_cluster_can_be_said(capsys):
    words = ("recipe=grpo_qwen2_5_7b_1x8h100", "--json")
    assert call(*words) == call(*words, "--nic", "100", "--link", "50") == 0
    plain, slow = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert (slow["link_gb_s"], slow["nic_gbit_s"]) == (50, 100)
    assert slow["push_s"] > plain["push_s"]
    plan = plan_of(Request(nic=100.0, link=50.0, settings=[RECIPE]))
    assert "50 GB/s inside its machine, 100 Gbit/s beyond" in headline(job_of(plan.config, plan.gpu))


def test_warnings_of_the_configuration_are_told_beside_the_answer(capsys):
    assert call(RECIPE, "--json", "actor.megatron.grad_offload=true") == 0
    out, told = capsys.readouterr()
    assert told.startswith("warning: actor.megatron.grad_offload")
    assert json.loads(out)["fits"]


def test_a_search_in_vain_says_so():
    plan = plan_of(Request(settings=[RECIPE]))
    job = job_of(plan.config, plan.gpu)
    found = predict(job)
    console = Console(width=160, record=True, file=io.StringIO())
    show_proposals(console, found, [])
    show_proposals(console, replace(found, fits=False), [])
    show_proposals(console, replace(found, fits=False), [Proposal(job, found, ["a=1"], "it fits")])
    text = console.export_text()
    assert "searched: no layout that fits is faster than this one" in text
    assert "searched: no layout on these GPUs that leaves what was typed fits either; use more of them" in text
    assert "searched: these fit; type the words behind the command" in text


def test_a_headline_counts_as_people_do():
    plan = plan_of(Request(gpu="h100", settings=["model=qwen3_mini"]))
    job = job_of(plan.config, plan.gpu)
    assert re.match(r"[\d,]+ parameters on 2 x h100", headline(job))
    assert "1 server of 1 on GPUs of their own" in headline(job)
    assert "2 servers of 1 on" in headline(replace(job, num_servers=2))
    assert headline(changed(job, hf=hf_of("qwen2_5_0_5b"))).startswith("494.0 million parameters")


def test_where_no_layout_says_the_gpu_it_must_be_said(capsys):
    assert call("model=qwen3_mini") == 2
    said = capsys.readouterr().err
    assert said.startswith("error: --gpu is missing, and no layout says it; expected one of a100")
    assert "for a run on CPUs trainer.check_only=true of its own command says what memory it takes" in said


def test_another_number_of_gpus_takes_the_layout_of_the_preset():
    plan = plan_of(Request(gpus=128, settings=[RECIPE]))
    assert plan.words[-1] == "layout=128x80"
    assert plan.config.trainer.nnodes == 16
    assert plan_of(Request(gpus=32, gpu="h200", settings=[RECIPE])).words[-1] == "layout=32x141"
    assert plan_of(Request(gpus=64, gpu="h200", settings=[RECIPE])).words == [RECIPE]  # as many as it has


def test_else_machines_and_servers_follow():
    plan = plan_of(Request(gpus=48, settings=[RECIPE]))
    assert plan.words[1:] == ["trainer.nnodes=6", "trainer.n_gpus_per_node=8", "rollout.num_servers=6"]
    assert (plan.config.trainer.num_ranks, plan.config.rollout.num_servers) == (48, 6)
    with pytest.raises(ValueError, match="does not divide 40 ranks"):
        plan_of(Request(gpus=40, settings=[RECIPE]))


def test_a_layout_in_words():
    plan = plan_of(Request(settings=[RECIPE]))
    assert layout_words(job_of(plan.config, plan.gpu).actor.layout) == "tp 4, pp 4, vpp 2"


def test_what_becomes_of_prompts_is_said(capsys):
    words = ("recipe=quickstart", "model=qwen2_5_0_5b", "--gpu", "h100", "--prompt-tokens", "16", "rollout.n=8")
    words += ("data.max_prompt_length=32", "data.max_response_length=32", "--response-tokens", "10", "--json")
    words += ("data.train_batch_size=4", "actor.ppo_mini_batch_size=4", "actor.ppo_epochs=1")
    assert call(*words, "trainer.device=cpu") == 0
    assert call(*words, "trainer.device=auto") == 0
    assert call(*words, "trainer.device=auto", "trainer.share_prefixes=on") == 0
    shared, apart, on_gpus = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert shared["computed_tokens"]["update_actor"] == 4 * (16 + 8 * 11)
    assert apart["computed_tokens"]["update_actor"] == 4 * 8 * 26
    once = "a prompt is computed once for its 8 completions (trainer.share_prefixes=auto): update_actor computes "
    assert any(line.startswith(once) for line in shared["assumed"])
    each = "a prompt is computed with each of its 8 completions; trainer.share_prefixes=auto shares it on CPUs alone"
    assert f"{each}, trainer.share_prefixes=on on GPUs too" in apart["assumed"]
    assert on_gpus["computed_tokens"] == shared["computed_tokens"]
    assert any(line.startswith(once.replace("=auto", "=on")) for line in on_gpus["assumed"])
