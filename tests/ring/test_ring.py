"""The whole ring: driver, Megatron ranks, a server over HTTP, rewards, pushes; small, and nothing replaced."""

import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib import resources
from pathlib import Path

import psutil
import pytest
import torch
from peft import PeftModel
from ring_cases import PPO, lines, settings, steps
from strikes import weights
from traces import events_of
from transformers import AutoModelForCausalLM

from megarl.cli import main
from megarl.metrics.reading.jsonl import NO_METRICS
from megarl.metrics.trackers.prometheus import PrometheusTracker
from megarl.metrics.trackers.tracker import Run
from megarl.servers.server_process import free_ports

pytestmark = pytest.mark.dist
KL = ["algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.type=adaptive", "algorithm.kl_ctrl.horizon=100"]


LOOK_S = 0.1  # between two looks at who listens
Addresses = set[tuple[str, str]]  # what a process is, and where it listens or takes datagrams


def listeners(done: threading.Event, others: set[int], mine: set[object]) -> Addresses:
    """Until it is done, of this process without what is `mine`, and of those that it starts without the `others`."""
    me, found = psutil.Process(), Addresses()
    while not done.wait(LOOK_S):
        for process in (process for process in (me, *me.children(recursive=True)) if process.pid not in others):
            with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):  # it has ended
                name = " ".join([process.name(), *process.cmdline()])  # a fork has a name of its own only
                for entry in process.net_connections("inet"):
                    takes_datagrams = entry.status == psutil.CONN_NONE and not entry.raddr
                    is_mine = process == me and entry.laddr in mine
                    if (entry.status == psutil.CONN_LISTEN or takes_datagrams) and entry.laddr and not is_mine:
                        found.add((name, entry.laddr.ip))
    return found


@pytest.fixture(scope="module")
def seen() -> Addresses:
    """Where the processes of the run `ppo` listened, once it has run."""
    return set()


@pytest.fixture(scope="module")
def ppo(parts: Path, seen: Addresses, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Actor, critic and reference on two tensor-parallel ranks; the KL in the reward too, steered."""
    runs = tmp_path_factory.mktemp("runs")
    more = ["trainer.check_export=true", "trainer.logger=[console,jsonl,tensorboard]", "rollout.check_every=2"]
    more += ["trainer.profile.steps=[2]", "trainer.profile.ranks=[1]"]
    words = settings(parts, runs, "ppo", *PPO, *KL, *more)
    me, done = psutil.Process(), threading.Event()
    others, mine = {p.pid for p in me.children(recursive=True)}, {c.laddr for c in me.net_connections("inet")}
    with ThreadPoolExecutor(1) as beside:
        watching = beside.submit(listeners, done, others, mine)
        try:
            assert main(["train", *words]) == 0
        finally:
            done.set()
    seen |= watching.result()
    return runs / "ppo"


def test_nothing_of_a_run_listens_but_on_loopback(ppo: Path, seen: Addresses) -> None:
    """During start, training and pushes; the driver, its ranks with gloo and the store, and the server."""
    listening = {name for name, _ in seen}
    assert any("roles.worker" in name for name in listening), listening
    assert any("hf_server.main" in name for name in listening), listening
    assert {address for _, address in seen} == {"127.0.0.1"}, seen


def test_every_push_is_verified_and_every_sample_knows_its_weights(ppo: Path) -> None:
    summary = json.loads((ppo / "summary.json").read_text())
    assert summary["pushes_verified"] == 4, "before the first step and after each of three"
    assert steps(ppo, "push/compared") == {1: 1.0, 2: 0.0, 3: 1.0}, "every second has whole tensors too"
    for sample in lines(ppo / "samples.jsonl"):
        assert sample["versions"] == [[sample["step"] - 1, 0, sample["num_tokens"]]]


def test_server_and_trainer_agree_and_nothing_has_moved_at_the_first_optimizer_step(ppo: Path) -> None:
    # float32 on both sides, other kernels and another order of sums: 1e-4 is the contract.
    assert 0 < max(steps(ppo, "rollout_corr/log_prob_gap_max").values()) < 1e-4
    # The same weights, perhaps packed otherwise: what is left is a mean over some 48 tokens of float32 roundings, of
    # log-probs near -5 (their last bit is 5e-7), which cancel but for one part in seven.
    assert max(abs(kl) for kl in steps(ppo, "actor/first_ppo_kl").values()) < 1e-7
    assert abs(steps(ppo, "actor/reward_kl_penalty")[1]) < 1e-7, "the reference is the policy at the start"


def test_the_run_folder_explains_itself(ppo: Path) -> None:
    page = (ppo / "README.md").read_text()
    written = ("summary.json", "report.html", "answers.md", "config.yaml")
    for name in (*written, "metrics.jsonl", "samples.jsonl", "tokens.jsonl", "timeline.jsonl"):
        assert (ppo / name).stat().st_size > 0
        assert name in page
    assert list((ppo / "tensorboard").iterdir())
    summary = json.loads((ppo / "summary.json").read_text())
    wanted = "score_before score_after score_after_stderr evaluated_version wall_s steps log_prob_gap_max"
    assert not set(wanted.split()) - set(summary)
    assert summary["score_transformers"] == summary["score_after"], "the exported model scores the same in transformers"


def test_every_panel_of_the_dashboard_shows_a_metric_of_the_run(ppo: Path) -> None:
    (port,) = free_ports(["127.0.0.1"])
    place = {"trainer": {"prometheus_host": "127.0.0.1", "prometheus_port": port}}
    tracker = PrometheusTracker(Run(ppo, "megarl", "ppo", place, 3))
    for row in lines(ppo / "metrics.jsonl"):
        tracker.log(row["step"], {name: value for name, value in row.items() if name not in NO_METRICS})
    tracker.stage("gen")
    families = set(re.findall(r"^(megarl_\w+)\{", tracker.page(), re.MULTILINE))
    tracker.close()
    dashboard = json.loads(resources.files("megarl.metrics.trackers").joinpath("grafana.json").read_text())
    shown = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    assert len(shown) > 30
    for expression in shown:
        (pattern,) = re.findall(r'^\{__name__=~"([^"]+)"|^(megarl_\w+)\{', expression)
        assert any(re.fullmatch("".join(pattern), family) for family in families), expression
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


def test_the_chosen_rank_has_written_a_trace_of_the_chosen_step(ppo: Path) -> None:
    (trace,) = (ppo / "profile").rglob("*.gz")
    assert trace == ppo / "profile" / "step_00000002" / "ranks_0" / "rank_1.trace.json.gz"
    names = {event["name"] for event in events_of(trace)}
    assert {"columns actor", "update actor", "update critic", "push actor"} <= names
    assert list(steps(ppo, "timing_s/profile")) == [2, 3], "started in step 2, written after it"


def test_the_kl_controller_moves_and_statistics_have_the_fields_names(ppo: Path) -> None:
    coefficients = steps(ppo, "actor/reward_kl_penalty_coeff")
    assert coefficients[1] == pytest.approx(0.001)
    assert coefficients[2] < coefficients[1], "the KL is far below its target"
    last = lines(ppo / "metrics.jsonl")[-2]
    wanted = """actor/pg_loss actor/pg_clipfrac actor/pg_clipfrac_lower actor/ppo_kl actor/entropy actor/kl_loss
        actor/grad_norm actor/lr actor/ratio_mean actor/ratio_std actor/ratio_min actor/ratio_max critic/vf_loss
        critic/vf_clipfrac critic/vf_explained_var critic/grad_norm critic/advantages/mean critic/returns/mean
        critic/score/mean response_length/mean prompt_length/mean rollout_corr/log_prob_gap_max timing_s/gen
        timing_s/reward timing_s/update_actor timing_s/update_weights timing_s/step perf/throughput perf/unaccounted"""
    assert not set(wanted.split()) - set(last)


@pytest.mark.full
def test_on_shared_gpus_servers_and_trainer_take_turns_and_nothing_else_changes(
    ppo: Path, parts: Path, tmp_path: Path
) -> None:
    """Servers give their memory back, models wait in host memory, checkpoints between: the same to the last bit.

    All of the actor comes and goes with its calls, the critic's moments and the reference with the trainer's turn.
    """
    offloaded = ("actor.megatron.param", "actor.megatron.optimizer", "critic.megatron.param")
    more = ["rollout.placement=shared", "trainer.save_freq=1", *(f"{part}_offload=true" for part in offloaded)]
    assert main(["train", *settings(parts, tmp_path, "turns", *PPO, *KL, *more)]) == 0
    for metric in ("actor/pg_loss", "actor/grad_norm", "critic/vf_loss", "critic/score/mean"):
        assert steps(tmp_path / "turns", metric) == steps(ppo, metric)
    assert weights(tmp_path / "turns") == weights(ppo)


@pytest.mark.full
def test_a_critic_may_have_ranks_of_its_own_and_servers_may_be_ahead(parts: Path, tmp_path: Path) -> None:
    """Four processes: two hold the actor as a pipeline, one the critic, and the last nothing."""
    more = ["actor.megatron.pipeline_model_parallel_size=2", "critic.megatron.pipeline_model_parallel_size=1"]
    more += ["trainer.n_gpus_per_node=4", "actor.num_ranks=2", "critic.first_rank=2", "critic.num_ranks=1"]
    more += ["rollout.ahead=1", "rollout.num_servers=2"]
    assert main(["train", *settings(parts, tmp_path, "own", *more)]) == 0
    logs = tmp_path / "own" / "logs"
    assert [len(list(logs.glob(f"ranks_{group}/rank_*.log"))) for group in (0, 1)] == [2, 1]
    assert len(steps(tmp_path / "own", "critic/vf_loss")) == 3
    lag = steps(tmp_path / "own", "off_policy/version_lag/max")
    assert lag[1] == 0 and 0 < max(lag.values()) <= 1, "one iteration ahead, never more"


@pytest.mark.full
def test_adapters_are_trained_alone_and_pushed_merged(parts: Path, tmp_path: Path) -> None:
    more = [*PPO, "actor.lora.rank=4", "actor.lora.alpha=8", "trainer.check_export=true"]
    more += ["trainer.total_training_steps=2"]
    assert main(["train", *settings(parts, tmp_path, "lora", *more)]) == 0
    run = tmp_path / "lora"
    summary = json.loads((run / "summary.json").read_text())
    assert summary["pushes"] == summary["pushes_verified"] == 3
    assert summary["score_transformers"] == summary["score_after"], "hf/ is the merged model"
    base = AutoModelForCausalLM.from_pretrained(parts / "model", dtype=torch.float32)
    adapted = PeftModel.from_pretrained(base, run / "adapter").merge_and_unload()
    merged = AutoModelForCausalLM.from_pretrained(run / "hf", dtype=torch.float32).state_dict()
    # One multiplication and addition in another order: float32's last bits.
    for name, tensor in adapted.state_dict().items():
        torch.testing.assert_close(merged[name], tensor, rtol=0, atol=1e-6)
