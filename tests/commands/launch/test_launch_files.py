"""What `megarl launch` prints: read by the checkers of schemas and scripts, by us, and compared with golden files.

After a change on purpose: PYTHONPATH=. python tests/commands/launch/test_launch_files.py writes the golden files.
"""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from megarl import __version__, cli
from megarl.cli import EXIT_USAGE
from megarl.commands.launch import command
from megarl.commands.this_machine import placed
from megarl.config import load_config
from megarl.config.placement import placements
from megarl.processes.signals import EXIT_TERMINATED
from megarl.trainer.preflight import preflight

FIXTURES = Path(__file__).parents[2] / "fixtures" / "launch"
BIG = "grpo_qwen2_5_72b_8x8h100"
NAME = "grpo-qwen2-5-72b-8x8h100"
SERVERS = ["--server-machines", "2"]
ON_KUBERNETES = ("job", "jobset", "trainjob", "rayjob")
GOLDEN = {
    "slurm.sbatch": f"slurm {BIG} trainer.spare_nodes=2 --server-machines 2 --image /shared/megarl.sqsh --queue h100 "
    "--account lab --time 24:00:00 --segment 4 --mounts /models:/models",
    "job.yaml": f"job {BIG} trainer.spare_nodes=1 --queue team",
    "jobset.yaml": f"jobset {BIG} --server-machines 2 --queue team --claim models",
    "trainjob.yaml": f"trainjob {BIG} --image registry/megarl:1",
    "rayjob.yaml": "rayjob grpo_llama3_8b_1x8h100 --queue team",
    "sky.yaml": f"sky {BIG}",
}


def launched(*words: str) -> str:
    return command.launch_file(command.parse(words))[1]


def documents(*words: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(launched(*words)))


def of_kind(kind: str, *words: str) -> dict[str, Any]:
    (found,) = [one for one in documents(*words) if one["kind"] == kind]
    return found


def specs(kind: str, *words: str) -> dict[str, dict[str, Any]]:
    """The specs of the batch Jobs of a job or a jobset."""
    if kind == "job":
        return {"trainer": of_kind("Job", kind, *words)["spec"]}
    return {one["name"]: one["template"]["spec"] for one in of_kind("JobSet", kind, *words)["spec"]["replicatedJobs"]}


def container(spec: dict[str, Any]) -> dict[str, Any]:
    (only,) = spec["template"]["spec"]["containers"]
    return only  # type: ignore[no-any-return]


def check(document: dict[str, Any]) -> None:
    """By Kubernetes' own schema, or by that of the fields of other kinds, whose pods are Kubernetes' again."""
    kind, metadata = document["kind"], {"name": "mine"}
    if kind not in SCHEMAS:
        return kubernetes_validate.validate(document, "1.31", strict=True)
    jsonschema.validate(document, SCHEMAS[kind])
    spec = document["spec"]
    if kind == "JobSet":
        for job in spec["replicatedJobs"]:
            whole = {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": job["template"]["spec"]}
            kubernetes_validate.validate(whole, "1.31", strict=True)
    if kind == "RayJob":
        cluster = spec["rayClusterSpec"]
        for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
            pod = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": metadata, "template": group["template"]}
            kubernetes_validate.validate(pod, "1.31", strict=True)
    if kind == "TrainJob":
        (job,) = spec["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
        patch, trainer = job["template"]["spec"]["template"]["spec"], spec["trainer"]
        whole = {**patch["containers"][0], "image": trainer["image"], "env": trainer["env"]}
        whole |= {"command": trainer["command"], "args": trainer["args"], "resources": trainer["resourcesPerNode"]}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {**patch, "containers": [whole]}}
        kubernetes_validate.validate(pod, "1.31", strict=True)


SCHEMAS = json.loads((FIXTURES / "schemas.json").read_text())


def golden(words: str) -> str:
    return launched(*words.split()).replace(__version__, "VERSION")


@pytest.mark.parametrize("file", GOLDEN)
def test_a_file_is_as_its_golden_one(file: str) -> None:
    assert golden(GOLDEN[file]) == (FIXTURES / file).read_text()
    assert max(map(len, golden(GOLDEN[file]).splitlines())) < 200


@pytest.mark.parametrize("name", ["mine", "true"])
@pytest.mark.parametrize("recipe", ["quickstart", BIG])
@pytest.mark.parametrize("kind", ON_KUBERNETES)
def test_a_manifest_is_what_its_cluster_takes(kind: str, recipe: str, name: str) -> None:
    """Also where a name, without quotes, would be a boolean."""
    for document in documents(kind, recipe, "--name", name, "--queue", "team"):
        check(document)
        assert document["metadata"]["name"] == document["metadata"]["labels"]["run"] == name
        if document["kind"].endswith(("Job", "JobSet")):
            assert document["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team"


def test_the_check_of_schemas_sees_what_is_wrong() -> None:
    whole = of_kind("RayJob", "rayjob", BIG)
    with pytest.raises(jsonschema.ValidationError):
        check({**whole, "spec": {**whole["spec"], "entryPoint": ""}})
    whole["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"][0]["comand"] = []
    with pytest.raises(kubernetes_validate.ValidationError):
        check(whole)


@pytest.mark.parametrize("recipe", ["quickstart", BIG])
@pytest.mark.parametrize("more", [[], ["--image", "megarl:1"]])
def test_a_task_of_skypilot_runs_the_words_on_each_machine(recipe: str, more: list[str]) -> None:
    task = yaml.safe_load(launched("sky", recipe, "trainer.project_name='of us'", *more))
    jsonschema.validate(task, SCHEMAS["sky"])
    assert ("setup" in task) is not bool(more)
    done = subprocess.run(["bash", "-n"], input=task["run"], text=True, capture_output=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_numbers_are_those_of_the_settings(capsys: pytest.CaptureFixture[str]) -> None:
    words = [BIG, "trainer.spare_nodes=1"]
    assert cli.main(["launch", "machines", *words]) == 0
    wanted = json.loads(capsys.readouterr().out)
    assert (wanted["nodes"], wanted["spares"], wanted["gpus"], wanted["gpu"]) == (8, 1, 8, "h100")
    script = launched("slurm", *words)
    assert "#SBATCH --nodes=9\n" in script and "#SBATCH --gpus-per-node=8\n" in script
    for kind in ("job", "jobset"):
        spec = specs(kind, *words)["trainer"]
        assert spec["completions"] == spec["parallelism"] == 9
        resources = container(spec)["resources"]
        assert resources["limits"]["nvidia.com/gpu"] == 8 and resources["requests"]["cpu"] == wanted["cpus"]
        assert int(resources["requests"]["memory"].removesuffix("G")) > wanted["memory_gb"]
    assert of_kind("TrainJob", "trainjob", *words)["spec"]["trainer"]["numNodes"] == 9
    workers = of_kind("RayJob", "rayjob", *words)["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]
    assert workers["replicas"] == workers["minReplicas"] == workers["maxReplicas"] == 9
    assert yaml.safe_load(launched("sky", *words))["num_nodes"] == 9
    assert "gpus-per-node" not in launched("slurm", "quickstart")


def test_the_entry_point_of_ray_is_a_train_on_ray() -> None:
    job = of_kind("RayJob", "rayjob", "grpo_llama3_8b_1x8h100", "trainer.project_name='of us'")
    words = "recipe=grpo_llama3_8b_1x8h100 'trainer.project_name='\"'\"'of us'\"'\"'' trainer.term_grace_s=540"
    assert job["spec"]["entrypoint"] == f"python -m megarl train --on ray {words}"


# ---- words

ODD = ['"it\'s"', "'$HOME'", "'a'", "'a;b'", "'(a)'"]


@pytest.mark.parametrize("kind", ["job", "jobset", "trainjob"])
def test_kubernetes_replaces_nothing_in_words(kind: str) -> None:
    found = documents(kind, BIG, "trainer.project_name='$(HOME)'")[-1]
    assert "trainer.project_name='$$(HOME)'" in json.dumps(found)


@pytest.mark.parametrize("kind", ["job", "jobset"])
def test_pods_find_the_first_one_and_know_their_number(kind: str) -> None:
    config, _ = load_config(container(specs(kind, BIG)["trainer"])["args"], command="train")
    first = {"job": f"{NAME}-0.{NAME}", "jobset": f"{NAME}-trainer-0-0.{NAME}"}[kind]
    found = placed(config, {"JOB_COMPLETION_INDEX": "1"}).trainer
    assert (found.node_rank, found.master_addr, found.nnodes) == (1, first, 8)
    (alone,) = [one["args"] for one in [container(specs(kind, "grpo_llama3_8b_1x8h100")["trainer"])]]
    assert not any(word.startswith("trainer.master_addr") for word in alone), "which would have no effect"


def test_all_that_a_job_needs_bears_its_name() -> None:
    names = [{(d["kind"], d["metadata"]["name"]) for d in documents("job", BIG, "--name", run)} for run in ("a", "b")]
    assert len(names[0]) == 3 and not names[0] & names[1]
    assert of_kind("NetworkPolicy", "job", BIG, "--name", "a")["spec"]["podSelector"]["matchLabels"] == {"run": "a"}
    assert of_kind("Service", "job", BIG, "--name", "a")["spec"]["selector"] == {"run": "a"}
    assert specs("job", BIG, "--name", "a")["trainer"]["template"]["spec"]["subdomain"] == "a"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["job", BIG, "--name", "My_Run"], r"--name My_Run: expected a letter, then lower-case .*, at most 40 in all"),
        (["job", BIG, "--name", "m" * 41], r"--name m+: expected"),
        (["slurm", BIG, "trainer.experiment_name=7th"], r"trainer.experiment_name=7th, .*'7th': expected .*\(--name"),
        (["job", BIG, "trainer.resume_mode=disable"], r"trainer.resume_mode=disable: a run that is started again"),
        (["job", BIG, *SERVERS], r"--server-machines: job has none; expected it with slurm, jobset"),
        (["rayjob", BIG, "--segment", "8"], r"--segment: rayjob has none; expected it with slurm"),
        (["machines", BIG, "--submit"], r"--submit: machines are only printed"),
        (["pod", BIG], r"invalid choice: 'pod'"),
        (["slurm", BIG, "--quue", "x"], r"there is no option --quue"),
        (["slurm", BIG, "--array", "0-3"], r"--array 0-3: each element would be the same run; expected"),
        (["sky", BIG, "trainer.project_name='of\n\nus'"], r"a word of several lines; expected it in a file"),
        *((["rayjob", BIG, f"trainer.project_name={text}"], r"Ray gives its words to a shell again") for text in ODD),
        (["slurm", BIG, "--queue", "a b"], r"'a b': expected one word"),
        (["sky", "gsm8k_qwen2_5_0_5b_1gpu"], r"no layout names the type of GPU; expected --gpu, such as --gpu H100"),
        (["slurm", "grpo_deepseek_v3_671b_64x8h200", *SERVERS], r"--server-machines 2: rollout.tensor_model_parallel_"),
        (["slurm", BIG, "trainer.nodes=2"], r"trainer.nodes"),
        (["secret"], r"expected .* \(--name\)"),
    ],
)
def test_what_a_cluster_cannot_have_is_refused_in_one_sentence(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["launch", *words]) == EXIT_USAGE
    out, said = capsys.readouterr()
    assert not out and len(said.splitlines()) == 1 and re.search(sentence, said), said


# ---- pods


def test_a_run_that_was_drained_begins_again_and_one_with_a_mistake_does_not() -> None:
    for kind in ("job", "jobset"):
        spec = specs(kind, BIG)["trainer"]
        drained, ended, mistake = spec["podFailurePolicy"]["rules"]
        assert (drained["action"], drained["onPodConditions"][0]["type"]) == ("Ignore", "DisruptionTarget")
        assert (ended["action"], ended["onExitCodes"]["values"]) == ("Ignore", [EXIT_TERMINATED])
        assert (mistake["action"], mistake["onExitCodes"]["values"]) == ("FailJob", [EXIT_USAGE])
        assert spec["podReplacementPolicy"] == "Failed", "the one before owns the run's folder until it has ended"
        assert spec["successPolicy"]["rules"] == [{"succeededIndexes": "0"}], "the driver's"


def test_failures_of_the_job_are_counted_for_each_pod() -> None:
    """One machine that fails ends all pods: a limit of the whole job would be used up after a few of them."""
    spec = specs("jobset", BIG)["trainer"]
    assert "backoffLimit" not in spec
    assert spec["backoffLimitPerIndex"] >= 10
    assert spec["maxFailedIndexes"] == 0, "a run with a machine too few waits for ever"
    assert spec["template"]["spec"]["restartPolicy"] == "Never", "which a limit for each pod wants"


@pytest.mark.parametrize("grace", ["540", "1200"])
def test_a_run_has_the_time_to_save_on_every_cluster(grace: str) -> None:
    words = [BIG] if grace == "540" else [BIG, f"trainer.term_grace_s={grace}"]
    config, _ = load_config(container(specs("job", *words)["trainer"])["args"], command="train")
    assert config.trainer.term_grace_s == float(grace)
    seconds = int(grace) + 60
    assert f"#SBATCH --signal=B:USR1@{seconds}\n" in launched("slurm", *words)
    for kind in ON_KUBERNETES:
        assert f"terminationGracePeriodSeconds: {seconds}" in launched(kind, *words)


def test_pods_take_their_keys_from_the_secret_of_their_run_and_no_rights() -> None:
    """Servers get their own key: nobody starts processes on the trainer's machines with it."""
    keys = {"MEGARL_TOKEN": "token", "MEGARL_SERVER_TOKEN": "server-token"}
    found = specs("jobset", BIG, *SERVERS)
    for spec, wanted in ((found["trainer"], [*keys]), (found["servers"], ["MEGARL_SERVER_TOKEN"])):
        tokens = {entry["name"]: entry for entry in container(spec)["env"] if "TOKEN" in entry["name"]}
        assert [*tokens] == wanted
        for name, entry in tokens.items():
            assert entry == {"name": name, "valueFrom": {"secretKeyRef": {"name": NAME, "key": keys[name]}}}
    assert of_kind("TrainJob", "trainjob", BIG)["spec"]["trainer"]["env"][0]["name"] == "MEGARL_TOKEN"
    for spec in found.values():
        pod = spec["template"]["spec"]
        assert pod["automountServiceAccountToken"] is False
        rights = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        assert container(spec)["securityContext"] == rights
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["securityContext"]["fsGroupChangePolicy"] == "OnRootMismatch"


def test_the_secret_of_a_run_is_new_each_time_and_stands_in_no_other_file(capsys: pytest.CaptureFixture[str]) -> None:
    found = []
    for _ in range(2):
        assert cli.main(["launch", "secret", "--name", "mine"]) == 0
        check(made := yaml.safe_load(capsys.readouterr().out))
        assert made["metadata"] == {"name": "mine", "labels": {"run": "mine"}}
        found += made["stringData"].values()
    assert len(set(found)) == 4 and all(re.fullmatch("[0-9a-f]{64}", value) for value in found)
    for file, words in GOLDEN.items():
        assert not re.search("[0-9a-f]{64}", launched(*words.split())), file


# ---- servers on machines of their own


def test_trainer_and_servers_of_a_jobset_are_one_workload_and_agree_on_where_servers_are() -> None:
    jobset = of_kind("JobSet", "jobset", BIG, *SERVERS, "rollout.tensor_model_parallel_size=4")
    assert jobset["spec"]["successPolicy"] == {"operator": "All", "targetReplicatedJobs": ["trainer"]}
    found = specs("jobset", BIG, *SERVERS, "rollout.tensor_model_parallel_size=4")
    trainer, _ = load_config(container(found["trainer"])["args"], command="train")
    served, _ = load_config(container(found["servers"])["args"], command="serve")
    hosts = [f"https://{NAME}-servers-0-{host}.{NAME}:{port}" for host in (0, 1) for port in (30000, 30001)]
    assert trainer.rollout.urls == served.rollout.urls == hosts
    assert found["servers"]["completions"] == found["servers"]["parallelism"] == 2
    assert container(found["servers"])["command"] == ["python", "-m", "megarl", "serve"]
    assert set(specs("jobset", BIG)) == {"trainer"}


def test_a_server_may_load_for_as_long_as_the_settings_say_before_its_pod_counts_as_hung() -> None:
    found = container(specs("jobset", BIG, *SERVERS, "rollout.start_timeout_s=4000")["servers"])
    for probe in ("startupProbe", "livenessProbe"):
        assert found[probe]["periodSeconds"] * found[probe]["failureThreshold"] > 4000, probe


def test_pods_of_the_trainer_may_hold_servers_that_are_larger_than_a_pod() -> None:
    config, _ = load_config(["recipe=grpo_deepseek_v3_671b_64x8h200"], command="train")
    assert not config.rollout.urls
    assert {len(machines) for machines, _ in placements(config, trains=True)} == {4}


def test_a_trainer_whose_servers_run_elsewhere_needs_no_sglang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The settings of the JobSet, in an image without SGLang: the first thing that is missing is the model."""
    monkeypatch.delenv("MEGARL_SGLANG_PYTHON", raising=False)
    monkeypatch.chdir(tmp_path)
    words = container(specs("jobset", BIG, *SERVERS)["trainer"])["args"]
    words = [*words, f"model.path={tmp_path}", "actor.use_kl_loss=false"]
    config, _ = load_config(words, command="train")
    assert config.rollout.engine == "sglang"
    with pytest.raises((OSError, ValueError)) as caught:
        preflight(config, 0.0)
    assert "SGLang" not in str(caught.value)
    for more in (["rollout.router=true"], ["rollout.urls=[]"]):
        config, _ = load_config([*words, *more], command="train")
        with pytest.raises(ValueError, match="SGLang"):
            preflight(config, 0.0)


# ---- Slurm


@pytest.mark.parametrize("more", [[], SERVERS, ["trainer.spare_nodes=1"], ["--image", "a.sqsh", "--mounts", "/a:/a"]])
@pytest.mark.parametrize("recipe", ["quickstart", BIG])
def test_shellcheck_finds_nothing_in_a_script(recipe: str, more: list[str], tmp_path: Path) -> None:
    if recipe == "quickstart" and "trainer.spare_nodes=1" in more:
        more = ["trainer.nnodes=2", *more]
    script = tmp_path / "run.sbatch"
    script.write_text(text := launched("slurm", recipe, *more))
    found = subprocess.run(["shellcheck", script], capture_output=True, text=True)
    assert found.returncode == 0, found.stdout
    for word in ("pkill", "killall", "kill -9 -1", "ssh ", "sudo", "StrictHostKeyChecking", "--api-key", "0.0.0.0"):
        assert word not in text, word
    assert "MEGARL_TOKEN=$" not in text


def test_a_script_runs_the_python_that_has_printed_it_but_in_an_image_its_own() -> None:
    assert f"    {sys.executable} -m megarl train " in launched("slurm", BIG)
    assert "    python -m megarl train " in launched("slurm", BIG, "--image", "a.sqsh")


def test_elements_of_an_array_are_runs_of_their_own() -> None:
    words = ["quickstart", "trainer.experiment_name=seeds_%a", "trainer.seed=%a", "--array", "3,5-6"]
    text = launched("slurm", *words)
    assert "#SBATCH --array=3,5-6\n" in text and "#SBATCH --job-name=seeds\n" in text and "slurm-%A_%a.log" in text
    assert "#SBATCH --job-name=my-seeds\n" in launched("slurm", words[0], "trainer.experiment_name='my_seeds'")
    with pytest.raises(ValueError, match=r"trainer.seed=3x"):
        launched("slurm", *words[:2], "trainer.seed=%ax", *words[3:])


# ---- submitting


@pytest.mark.parametrize(
    ("kind", "tool", "first"),
    [
        ("slurm", "sbatch", "#!"),
        ("jobset", "kubectl", "# The keys"),
        ("rayjob", "kubectl", "# A"),
        ("sky", "sky", "# A"),
    ],
)
def test_it_is_given_to_the_program_that_submits(
    kind: str, tool: str, first: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """With its secret, where pods read one."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cli.main(["launch", kind, BIG, "--submit"]) == EXIT_USAGE
    assert f"megarl launch {kind} --submit: {tool} is not here; expected the file" in capfd.readouterr().err
    (tmp_path / tool).write_text('#!/bin/bash\necho "$*"; echo "${MEGARL_TOKEN:-}"; /bin/cat "${!#}"; exit 3\n')
    (tmp_path / tool).chmod(0o755)
    assert cli.main(["launch", kind, BIG, "--submit"]) == 3
    words, token, text = capfd.readouterr().out.split("\n", 2)
    assert text.startswith(first)
    assert bool(re.fullmatch("[0-9a-f]{64}", token)) == (kind == "sky")
    assert not Path(words.split()[-1]).exists()
    if kind == "jobset":
        assert [one["kind"] for one in yaml.safe_load_all(text)] == ["Secret", "NetworkPolicy", "JobSet"]


if __name__ == "__main__":
    for name_of_file, words_of_file in GOLDEN.items():
        (FIXTURES / name_of_file).write_text(golden(words_of_file))
