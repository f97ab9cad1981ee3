"""The documents' Python blocks, executed as they are printed: this layer computes the same numbers."""

from pathlib import Path
from textwrap import indent
from types import SimpleNamespace

import pytest
import torch
from config_helpers import tables_kept
from readme_blocks import blocks

from megarl.algo import ActorLoss, CriticLoss, estimate, load_plugins, step_columns
from megarl.samples.batch import Batch

D = torch.float64
DOCUMENTS = Path(__file__).parents[2] / "fixtures" / "source_documents"
BLOCKS = {block.file: block.text for block in blocks((DOCUMENTS / "python_blocks.md").read_text())}
PRINTED = (DOCUMENTS / "policy_loss_function.txt").read_text()
LENGTHS, GROUPS = [4, 3, 5, 2], torch.tensor([0, 0, 1, 1])
N = sum(LENGTHS)


def columns() -> dict[str, torch.Tensor]:
    """A step of 14 trainable tokens; ratios far enough from 1 that clips hold."""
    g = torch.Generator().manual_seed(0)
    noise = {name: torch.randn(N, generator=g, dtype=D) for name in ("old", "new", "ref", "a", "v", "r", "h")}
    old = -1.5 - 0.3 * noise["old"]
    return {
        "response_mask": torch.ones(N, dtype=D),
        "old_log_probs": old,
        "log_probs": old + 0.4 * noise["new"],
        "ref_log_probs": old + 0.3 * noise["ref"],
        "advantages": noise["a"],
        "values": noise["v"],
        "returns": noise["r"],
        "rollout_log_probs": old,
        "entropy": noise["h"].abs(),
    }


def batch_of(col: dict[str, torch.Tensor]) -> Batch:
    return Batch(torch.arange(N), torch.tensor(LENGTHS), col, {"group": GROUPS, "score": torch.zeros(len(LENGTHS))})


def executed(name: str, **given: object) -> dict:
    """The names that a block leaves behind, given those that it takes for granted."""
    space = {"torch": torch, "exp": torch.exp, "min": torch.minimum, "clamp": torch.clamp, "clip": torch.clamp, **given}
    exec(BLOCKS[name], space)
    return space


def ours(loss: ActorLoss, col: dict[str, torch.Tensor], agg_mode: str = "token-mean") -> float:
    batch = step_columns(batch_of(col), loss=loss, agg_mode=agg_mode)
    return loss(batch, {name: col[name] for name in ("log_probs", "entropy")}).loss.item()


def test_ppo_and_reinforce():
    col = columns()
    ppo = executed("ppo", ε=0.2, **col)["loss"]
    assert ours(ActorLoss("ppo", clip_c="off"), col) == pytest.approx(ppo.mean().item())
    reinforce = executed("reinforce", **col)["loss"]
    assert ours(ActorLoss("reinforce"), col) == pytest.approx(reinforce.mean().item())


def test_grpo_compares_rewards_within_groups():
    rewards = torch.tensor([1.0, 0.0, 3.0, 2.0])
    mean = {group: rewards[group == GROUPS].mean() for group in (0, 1)}
    relative = executed("grpo", rewards=rewards, group_mean=lambda r: torch.stack([mean[int(g)] for g in GROUPS]))
    batch = batch_of(columns()).with_per_sequence(score=rewards)
    found, _ = estimate(batch, adv_estimator="grpo", norm_adv_by_std_in_grpo=False)
    of_samples = [part[0].item() for part in found.split(found.columns["advantages"])]
    assert of_samples == pytest.approx(relative["relative_rewards"].tolist())


def test_the_surrogate_with_kl_and_the_terms_that_are_added_to_it():
    col = columns()
    kl = (col["log_probs"] - col["ref_log_probs"]).mean()
    given = {"new_log_probs": col["log_probs"], "cliprange": 0.2, "use_kl_loss": True, "kl_coef": 0.1}
    policies = {"new_policy": None, "ref_policy": None, "kl_divergence": lambda new, ref: kl}
    surrogate = executed("surrogate", **col, **given, **policies)["policy_loss"]
    how = {"clip_c": "off", "use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "kl"}
    assert ours(ActorLoss("ppo", **how), col) == pytest.approx(surrogate.item())

    plain = ours(ActorLoss("ppo", clip_c="off"), col)
    entropy = executed("entropy_loss", pg_loss=plain, entropy_loss=col["entropy"].mean(), entropy_coeff=0.05)
    assert ours(ActorLoss("ppo", clip_c="off", entropy_coeff=0.05), col) == pytest.approx(entropy["policy_loss"].item())

    this = SimpleNamespace(config=SimpleNamespace(kl_loss_coef=0.1))
    with_kl = executed("kl_loss", policy_loss=plain, kl_loss=kl, self=this)["policy_loss"]
    assert with_kl.item() == pytest.approx(surrogate.item())


def test_the_value_loss_is_twice_ours():
    """0.5 (V - R)^2 here, as in the papers; the factor is one of critic.optim.lr, which Adam does not see."""
    col = columns()
    loss = CriticLoss(None)
    step = step_columns(batch_of(col), loss=loss, agg_mode="token-mean")
    found = loss(step, {"values": col["values"]}).loss.item()
    assert 2 * found == pytest.approx(executed("value_loss", **col)["value_loss"].item())


MODIFIED = {  # block -> what of the printed function it takes the place of, and the number that it wants
    "add_entropy": ("total_loss = policy_loss + entropy_weight * entropy_bonus\n", "entropy_coeff"),
    "add_kl": ("total_loss = policy_loss + entropy_weight * entropy_bonus\n", "kl_coeff"),
    "clamp_advantages": ("surr1 = ratio * advantages\n", "k"),
}


@pytest.mark.parametrize("name", MODIFIED)
@pytest.mark.parametrize("mode", ["token_level", "sample_level"])
def test_the_printed_loss_with_a_printed_modification(name, mode, tmp_path):
    """The printed function with the block pasted into it; a number that it names comes from the configuration."""
    old, number = MODIFIED[name]
    assert PRINTED.count(old) == 1
    block = f"{number} = config.{number}\n{BLOCKS[name]}"
    text = PRINTED.replace(f"    {old}", indent(block, "    "))
    path = tmp_path / "mine.py"
    path.write_text(text)
    col = columns()
    with tables_kept():
        load_plugins([str(path)])
        found = ours(ActorLoss("my_ppo_variant", args={number: 0.5}), col, mode)
    new, a = col["log_probs"], col["advantages"]
    r = (new - col["old_log_probs"]).exp()
    surr1 = r * (a.clamp(-0.5, 0.5) if name == "clamp_advantages" else a)
    added = {
        "add_entropy": 0.5 * -new.exp() * new,
        "add_kl": 0.5 * (new - col["old_log_probs"]),
        "clamp_advantages": 0.01 * -new.exp() * new,  # as printed above it
    }
    token_loss = -torch.min(surr1, r.clamp(0.8, 1.2) * a) + added[name]
    means = torch.stack([part.mean() for part in token_loss.split(LENGTHS)])
    assert found == pytest.approx((token_loss.mean() if mode == "token_level" else means.mean()).item())


def test_every_block_is_executed_by_a_test():
    # tests/mcore/logprobs/test_logprobs.py, tests/metrics/advice/test_advice.py
    elsewhere = {"entropy_from_logits", "monitoring"}
    here = {"ppo", "reinforce", "grpo", "surrogate", "entropy_loss", "kl_loss", "value_loss", *MODIFIED}
    assert set(BLOCKS) == here | elsewhere
