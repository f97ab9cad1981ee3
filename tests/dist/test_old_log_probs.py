"""Old log-probs of the first optimizer step's forward pass, against those of a pass of their own: whole iterations."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from late_copies import late_copies
from spawn import Ranks
from torch import Tensor

from megarl.algo.segments import clean
from megarl.arch.layout import Layout
from megarl.config import layout_of, load_config
from megarl.data.examples.sizes import TinySizes
from megarl.data.examples.tiny import write_tiny_model
from megarl.group import Reply
from megarl.group.message import Message, Setup
from megarl.mcore.models.model import unwrap
from megarl.mcore.setup import destroy_groups
from megarl.metrics.computing.stats import finalise
from megarl.metrics.computing.timer import Timer
from megarl.roles.worker import Worker
from megarl.samples.sample import Completion, Prompt, Sample, VersionSpan
from megarl.train import learn
from megarl.trainer.algorithm import make_algorithm
from megarl.trainer.roles import load_roles, make_roles

pytestmark = pytest.mark.dist

NUM_STEPS, NUM_PROMPTS, N = 2, 3, 3


class EveryRank:
    """Stands for a Group: each rank makes every call, works on the payload of its replica, and gets all replies."""

    def __init__(self, layout: Layout) -> None:
        self.worker = Worker()
        self.worker.setup(Setup(layout, "cpu", 0, 60.0), {})
        self.num_replicas = self.worker.rank_info.num_replicas

    def call(self, message: Message, payloads: Sequence[dict[str, Tensor]] | None = None) -> list[Reply]:
        info = self.worker.rank_info
        own = getattr(self.worker, message.method())(message, payloads[info.replica] if payloads else {})
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, (info.replica, info.is_reporter, own))
        told = {replica: Reply(*answer) for replica, is_reporter, answer in every if is_reporter}
        return [told[replica] for replica in range(self.num_replicas)]


def iterate(folder: str, words: Sequence[str]) -> dict[str, Any]:
    """Two iterations: statistics, stages and old log-probs of each, and this rank's weights in the end."""
    config, _ = load_config([f"model.path={folder}", "data.train_files=[a.jsonl]", *words], command="train")
    algorithm = make_algorithm(config)
    group: Any = EveryRank(layout_of(config.actor.megatron))
    try:
        roles = make_roles(config, algorithm, lambda _: group)
        load_roles(roles, config, NUM_STEPS, algorithm.critic_warmup, resumes=False)
        found: dict[str, Any] = {"stats": [], "stages": [], "old": []}
        for step in range(NUM_STEPS):
            timer = Timer()
            batch, stats = learn(step, answered(step), roles, algorithm, timer)
            assert batch is not None
            found["stats"].append(finalise(stats))
            found["stages"].append([name for name, *_ in timer.stages])
            found["old"].append(clean(batch.columns["old_log_probs"], batch.columns["response_mask"] != 0))
        found["weights"] = []
        for name in roles.trainable:
            with group.worker.readable(name) as role:
                found["weights"] += [p.detach().clone() for x in role.model for p in unwrap(x).parameters()]
        return found
    finally:
        destroy_groups()


def iterate_offloaded(folder: str, words: Sequence[str]) -> dict[str, Any]:
    """The same; what is onloaded comes as late as it may."""
    with late_copies():
        return iterate(folder, [*words, *(f"actor.megatron.{part}_offload=true" for part in ("param", "optimizer"))])


def answered(step: int) -> list[list[Sample]]:
    """Groups of answers of unequal lengths, some tokens of them by the weights of the step before."""
    draw = torch.Generator().manual_seed(step)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=draw))

    groups = []
    for visit in range(NUM_PROMPTS):
        prompt = Prompt(f"0-{visit}", [number(4, 40) for _ in range(number(2, 9))], "")
        group = []
        for _ in range(N):
            size = number(2, 12)
            versions = (VersionSpan(max(step - 1, 0), 0, 1), VersionSpan(step, 1, size))
            ids, log_probs = [number(4, 40) for _ in range(size)], [-number(30, 40) / 10 for _ in range(size)]
            group.append(Sample.of(prompt, Completion(ids, log_probs, "stop", versions), number(0, 5) / 4))
        groups.append(group)
    return groups


GRPO = ["algorithm.adv_estimator=grpo"]
PPO = ["algorithm.adv_estimator=gae", "critic.optim.lr=1e-3"]
TP, PP = (f"actor.megatron.{name}_model_parallel_size=2" for name in ("tensor", "pipeline"))
CP = "actor.megatron.context_parallel_size=2"
EPOCHS = "actor.ppo_epochs=2"
LOSS = "algorithm.policy_loss_fn="
KL = ["actor.use_kl_loss=true", "actor.kl_loss_type=k2", "actor.kl_importance=true"]
FULL_KL = ["actor.use_kl_loss=true", "actor.kl_loss_type=full"]
BEHIND = ["rollout.ahead=1", "rollout.max_age=0"]
CASES: dict[str, list[str]] = {
    "full kl pp2": [*GRPO, *FULL_KL, PP, EPOCHS],
    "kl loss dp2": [*GRPO, *KL, EPOCHS],
    "grpo pp2": [*GRPO, PP, EPOCHS],
    "bypass dp2": [*GRPO, *BEHIND, "algorithm.rollout_correction.bypass=true", EPOCHS],
    "grpo tp2 of sequences": [*GRPO, TP, "actor.ppo_micro_batch_size_per_gpu=2"],
    "grpo cp2": [*GRPO, CP, EPOCHS],
    "ppo pp2": [*PPO, PP],
    "ppo dp2": [*PPO, EPOCHS],
    "gspo dp2": [*GRPO, f"{LOSS}gspo", EPOCHS],
    "cispo tp2": [*GRPO, f"{LOSS}cispo", TP, EPOCHS],
    "dual clip dp2": [*GRPO, "actor.clip_ratio_c=1.5", "actor.entropy_coeff=0.1", EPOCHS],
    "one iteration ahead dp2": [*GRPO, *BEHIND, EPOCHS],
}
MINIS = ["actor.ppo_mini_batch_size=1", "actor.ppo_micro_batch_size_per_gpu=1", EPOCHS]
CASES_OF_MINIS = {
    "grpo dp2": [*GRPO, *MINIS],
    "ppo tp2": [*PPO, TP, *MINIS],
    "gspo pp2": [*GRPO, f"{LOSS}gspo", PP, *MINIS],
}
OFFLOADED = {"bf16 tp2": [*GRPO, TP, EPOCHS, "model.dtype=bfloat16"], "ppo of minis": [*PPO, *MINIS]}
FAST = ("grpo dp2",)


def marked(names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=() if name in FAST else pytest.mark.full) for name in names]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where: Path = tmp_path_factory.mktemp("model")
    return write_tiny_model(
        where / "tiny", TinySizes(hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, ffn=48), seed=1
    )


def both(ranks: Ranks, folder: Path, words: list[str]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Each rank's iterations, with a pass of their own and without."""
    always, never = ([*common(words), f"actor.old_log_prob_freq={every}"] for every in (1, 0))
    return ranks.run(iterate, str(folder), always), ranks.run(iterate, str(folder), never)


def common(words: list[str]) -> list[str]:
    packed = [] if "micro_batch" in str(words) else ["actor.ppo_max_token_len_per_gpu=45"]
    found = ["data.max_prompt_length=16", "data.max_response_length=16", "data.train_batch_size=3", "rollout.n=3"]
    return [*found, "trainer.device=cpu", "trainer.n_gpus_per_node=2", "actor.optim.lr=1e-3", *packed, *words]


def compare(own: dict[str, Any], first: dict[str, Any], *, share: float = 0, is_compared: bool = False) -> None:
    """To the bit."""
    assert all("old_log_prob" in stages for stages in own["stages"])
    for step in range(NUM_STEPS):
        assert torch.equal(own["old"][step], first["old"][step])
        measured, other = dict(own["stats"][step]), dict(first["stats"][step])
        assert measured.pop("perf/old_log_prob_share") == 1
        assert other.pop("perf/old_log_prob_share") == pytest.approx(share)
        if not is_compared:
            assert measured.pop("actor/first_ppo_kl") == 0
        assert measured == other
    assert all(torch.equal(a, b) for a, b in zip(own["weights"], first["weights"], strict=True))


@pytest.mark.parametrize("case", marked(CASES))
def test_an_iteration_without_the_pass_is_the_same(two_ranks: Ranks, folder: Path, case: str) -> None:
    for own, first in zip(*both(two_ranks, folder, CASES[case]), strict=True):
        assert not any("old_log_prob" in stages for stages in first["stages"])
        compare(own, first, is_compared="bypass" in case)


@pytest.mark.full
@pytest.mark.parametrize("case", marked(CASES_OF_MINIS))
def test_with_several_mini_batches_a_pass_over_all_but_the_first_does(
    two_ranks: Ranks, folder: Path, case: str
) -> None:
    """Each sequence is a micro-batch of its own: else the passes pack the sequences otherwise, and round otherwise."""
    for own, first in zip(*both(two_ranks, folder, CASES_OF_MINIS[case]), strict=True):
        assert all("old_log_prob" in stages for stages in first["stages"])
        compare(own, first, share=2 / 3)


@pytest.mark.full
@pytest.mark.parametrize("case", marked(OFFLOADED))
def test_roles_that_are_offloaded_learn_the_same(two_ranks: Ranks, folder: Path, case: str) -> None:
    """Whole updates of the policy and the critic, whose moments come while they compute."""
    words = common(OFFLOADED[case])
    stay, offloaded = (two_ranks.run(how, str(folder), words) for how in (iterate, iterate_offloaded))
    for own, other in zip(stay, offloaded, strict=True):
        assert own["stats"] == other["stats"]
        assert all(torch.equal(a, b) for a, b in zip(own["weights"], other["weights"], strict=True))
