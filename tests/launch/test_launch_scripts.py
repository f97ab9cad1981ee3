"""The scripts that start runs, and the manifests of Kubernetes: read by their checkers, and by us."""

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from megarl.cli import EXIT_USAGE
from megarl.commands.this_machine import placed
from megarl.config import load_config
from megarl.config.placement import placements
from megarl.processes.signals import EXIT_TERMINATED
from megarl.trainer.preflight import preflight

LAUNCH = Path(__file__).parents[2] / "launch"
SCRIPTS = sorted([*LAUNCH.rglob("*.sh"), *LAUNCH.rglob("*.sbatch")])
MANIFESTS = sorted((LAUNCH / "k8s").glob("*.yaml"))


def documents(file: Path, run: str = "mine") -> list[dict[str, Any]]:
    """As `envsubst` makes them."""
    return list(yaml.safe_load_all(file.read_text().replace("${RUN}", run)))


def pods(kind: str, run: str = "mine") -> list[dict[str, Any]]:
    return [one for file in MANIFESTS for one in documents(file, run) if one["kind"] == kind]


def secret(run: str) -> dict[str, Any]:
    """As launch/k8s/secret.sh makes it."""
    command = ["bash", LAUNCH / "k8s/secret.sh"]
    found = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "RUN": run}, check=True)
    made: dict[str, Any] = yaml.safe_load(found.stdout)
    return made


def words_of(workload: dict[str, Any]) -> list[str]:
    return workload["spec"]["template"]["spec"]["containers"][0]["args"]


def test_shellcheck_finds_nothing() -> None:
    command = ["shellcheck", "--external-sources", "--source-path=SCRIPTDIR", *SCRIPTS]
    found = subprocess.run(command, cwd=LAUNCH.parent, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_a_script_ends_only_what_it_started_and_shows_no_secret(script: Path) -> None:
    text = script.read_text()
    for word in ("pkill", "killall", "kill -9 -1", "ssh ", "sudo", "StrictHostKeyChecking", "--api-key", "0.0.0.0"):
        assert word not in text, word
    assert "MEGARL_TOKEN=$" not in text


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["2", "0"], "NODES NODE_RANK ADDRESS_OF_NODE_0"),
        (["2", "0", "127.0.0.1", "recipe=quickstart"], "umask 077; openssl rand -hex 32"),  # without a token
    ],
)
def test_one_that_is_told_too_little_says_what_it_wants(words: list[str], told: str) -> None:
    env = {k: v for k, v in os.environ.items() if not k.startswith("MEGARL_TOKEN")}
    found = subprocess.run(["bash", LAUNCH / "node.sh", *words], capture_output=True, text=True, env=env)
    assert found.returncode == 2
    assert told in found.stderr


@pytest.mark.parametrize("run", ["mine", "2026", "on"])
@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda file: file.name)
def test_a_manifest_is_what_kubernetes_takes(manifest: Path, run: str) -> None:
    """Also where a run's name, without quotes, would be a number or a boolean."""
    assert documents(manifest, run), "a manifest describes something"
    for document in documents(manifest, run):
        kubernetes_validate.validate(document, "1.31", strict=True)
        assert document["metadata"]["labels"]["run"] == run, "by which all of a run is deleted"


@pytest.mark.parametrize("run", ["mine", "2026", "on", "true", "1e3"])
def test_a_run_has_its_name_as_it_is_written(run: str) -> None:
    (job,) = pods("Job", run)
    config, _ = load_config(words_of(job), command="train")
    assert config.trainer.experiment_name == run
    kubernetes_validate.validate(made := secret(run), "1.31", strict=True)
    assert made["metadata"] == {"name": f"megarl-{run}", "labels": {"run": run}}


def test_two_runs_in_one_namespace_have_no_name_in_common_and_do_not_hear_each_other() -> None:
    names = [
        {(one["kind"], one["metadata"]["name"]) for file in MANIFESTS for one in documents(file, run)}
        for run in ("mine", "yours")
    ]
    assert len(names[0]) == len(names[1]) == 5
    assert not names[0] & names[1]
    (policy,) = pods("NetworkPolicy")
    assert policy["spec"]["podSelector"]["matchLabels"] == {"run": "mine"}
    for service in pods("Service"):
        assert "mine" in str(service["spec"]["selector"])
    for workload in (*pods("Job"), *pods("StatefulSet")):
        assert workload["spec"]["template"]["metadata"]["labels"]["run"] == "mine"


def test_a_run_that_was_drained_begins_again_and_one_with_a_mistake_does_not() -> None:
    (job,) = pods("Job")
    drained, ended, mistake = job["spec"]["podFailurePolicy"]["rules"]
    assert (drained["action"], drained["onPodConditions"][0]["type"]) == ("Ignore", "DisruptionTarget")
    assert (ended["action"], ended["onExitCodes"]["values"]) == ("Ignore", [EXIT_TERMINATED])
    assert (mistake["action"], mistake["onExitCodes"]["values"]) == ("FailJob", [EXIT_USAGE])
    assert job["spec"]["podReplacementPolicy"] == "Failed", "the one before owns the run's folder until it has ended"
    assert job["spec"]["successPolicy"]["rules"] == [{"succeededIndexes": "0"}], "the driver's"


def test_a_server_may_load_for_as_long_as_the_settings_say_before_its_pod_counts_as_hung() -> None:
    (servers,) = pods("StatefulSet")
    config, _ = load_config(words_of(servers), command="serve")
    (container,) = servers["spec"]["template"]["spec"]["containers"]
    for probe in ("startupProbe", "livenessProbe"):
        seconds = container[probe]["periodSeconds"] * container[probe]["failureThreshold"]
        assert seconds > config.rollout.start_timeout_s, probe


def test_pods_take_their_keys_from_the_secret_of_their_run_and_no_rights() -> None:
    """Servers get their own key: nobody starts processes on the trainer's machines with it."""
    (job,), (servers,) = pods("Job"), pods("StatefulSet")
    keys = {"MEGARL_TOKEN": "token", "MEGARL_SERVER_TOKEN": "server-token"}
    assert secret("mine")["stringData"].keys() == set(keys.values())
    for workload, wanted in ((job, [*keys]), (servers, ["MEGARL_SERVER_TOKEN"])):
        spec = workload["spec"]["template"]["spec"]
        (container,) = spec["containers"]
        tokens = {entry["name"]: entry for entry in container["env"] if "TOKEN" in entry["name"]}
        assert [*tokens] == wanted
        for name, entry in tokens.items():
            of_run = {"secretKeyRef": {"name": "megarl-mine", "key": keys[name]}}
            assert entry == {"name": name, "valueFrom": of_run}
        assert spec["automountServiceAccountToken"] is False
        assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["securityContext"]["fsGroupChangePolicy"] == "OnRootMismatch"


def test_the_secret_of_a_run_is_new_each_time_and_is_on_no_command_line() -> None:
    one, two = (secret("mine")["stringData"] for _ in range(2))
    values = {*one.values(), *two.values()}
    assert len(values) == 4
    assert all(re.fullmatch("[0-9a-f]{64}", value) for value in values), "256 bits each, and text"
    for file in (LAUNCH / "k8s").iterdir():
        assert "--from-literal" not in file.read_text(), "others on the machine read words of commands"
    without = {name: value for name, value in os.environ.items() if name != "RUN"}
    found = subprocess.run(["bash", LAUNCH / "k8s/secret.sh"], env=without, capture_output=True, text=True)
    assert (found.returncode, found.stdout) == (2, "")
    assert "RUN=mine bash launch/k8s/secret.sh" in found.stderr


def test_the_pods_of_the_job_are_the_machines_of_its_settings() -> None:
    (job,) = pods("Job")
    config, _ = load_config(words_of(job), command="train")
    pod = job["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] >= config.trainer.term_grace_s + 30, "it has the time to save"
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == config.trainer.num_machines
    assert placed(config, {"JOB_COMPLETION_INDEX": "1"}).trainer.node_rank == 1
    assert config.trainer.master_addr == "megarl-mine-0.megarl-mine", (
        "NAME-INDEX.SUBDOMAIN, a name of the headless service"
    )
    for workload in (job, *pods("StatefulSet")):
        (container,) = workload["spec"]["template"]["spec"]["containers"]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == config.trainer.n_gpus_per_node == 8
        assert {"cpu", "memory"} <= container["resources"]["requests"].keys()


def test_pods_of_the_trainer_may_hold_servers_that_are_larger_than_a_pod() -> None:
    config, _ = load_config(["recipe=grpo_deepseek_v3_671b_64x8h200"], command="train")
    assert not config.rollout.urls
    assert {len(machines) for machines, _ in placements(config, trains=True)} == {4}


def test_failures_of_the_job_are_counted_for_each_pod() -> None:
    """One machine that fails ends all pods: a limit of the whole job would be used up after a few of them."""
    (job,) = pods("Job")
    spec = job["spec"]
    assert "backoffLimit" not in spec
    assert spec["backoffLimitPerIndex"] >= 10
    assert spec["maxFailedIndexes"] == 0, "a run with a machine too few waits for ever"
    assert spec["template"]["spec"]["restartPolicy"] == "Never", "which a limit for each pod wants"


def test_a_trainer_whose_servers_run_elsewhere_needs_no_sglang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The settings of the Job, in an image without SGLang: the first thing that is missing is the model."""
    monkeypatch.delenv("MEGARL_SGLANG_PYTHON", raising=False)
    monkeypatch.chdir(tmp_path)
    (job,) = pods("Job")
    words = [*words_of(job), f"model.path={tmp_path}", "actor.use_kl_loss=false"]
    config, _ = load_config(words, command="train")
    assert config.rollout.engine == "sglang"
    with pytest.raises((OSError, ValueError)) as caught:
        preflight(config, 0.0)
    assert "SGLang" not in str(caught.value)
    for more in (["rollout.router=true"], ["rollout.urls=[]"]):
        config, _ = load_config([*words, *more], command="train")
        with pytest.raises(ValueError, match="SGLang"):
            preflight(config, 0.0)


def test_trainer_and_servers_agree_on_where_servers_are() -> None:
    (job,), (servers,) = pods("Job"), pods("StatefulSet")
    trainer, _ = load_config(words_of(job), command="train")
    served, _ = load_config(words_of(servers), command="serve")
    assert trainer.rollout.urls == served.rollout.urls
    name, service = servers["metadata"]["name"], servers["spec"]["serviceName"]
    wanted = {f"https://{name}-{index}.{service}:30000" for index in range(servers["spec"]["replicas"])}
    assert set(served.rollout.urls) == wanted
