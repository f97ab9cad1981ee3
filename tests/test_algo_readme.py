"""The page of the loss layer: its tables are those of the code, its defaults the functions', its files run."""

import re
import shlex
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from config_helpers import BASE
from omegaconf import OmegaConf
from readme_blocks import ROOT, blocks, code_spans

from megarl import algo, rewards
from megarl.algo import ActorLoss, estimate, step_columns
from megarl.batch import Batch
from megarl.config import Config, load_config
from megarl.config.keys import groups, leaf_types, mapping_of
from megarl.config.schema.algorithm import Algorithm, FilterGroups, OverlongBuffer, RolloutCorrection
from megarl.metrics.advice.rules import RULES
from megarl.plugins import load_plugins
from megarl.sample import Completion, Prompt, VersionSpan
from megarl.trainer.algorithm import make_algorithm

PAGE = (ROOT / "megarl/algo/README.md").read_text()
FILES = {block.file: block.text for block in blocks(PAGE) if block.file}
COMMANDS = [shlex.split(b.text.replace("\\\n", " "))[1:] for b in blocks(PAGE) if b.language == "bash"]


def section(heading: str) -> str:
    _, found, rest = PAGE.partition(f"\n## {heading}\n")
    assert found, f"the page has no section {heading}"
    return rest.partition("\n## ")[0]


def table(text: str) -> list[list[str]]:
    """The cells of each row, without the head; every row has as many as the head."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip("|"))] for line in lines]
    assert len({len(row) for row in rows}) == 1, "a table that renders"
    return rows[2:]


def names(heading: str) -> list[str]:
    return [name for row in table(section(heading)) for name in code_spans(row[0])]


def settings(cell: str) -> dict[str, object]:
    """key=value of the code spans of a cell, values as YAML has them; a key alone has none."""
    pairs = (span.partition("=") for span in code_spans(cell))
    return {key: OmegaConf.from_dotlist([f"x={value}"]).x if found else None for key, found, value in pairs}


def default_of(key: str) -> object:
    """What the schema has for a key."""
    found = OmegaConf.to_container(OmegaConf.structured(Config), resolve=False)
    for part in key.split("."):
        found = found[part]
    return found


@pytest.mark.parametrize(
    ("heading", "there"),
    [
        ("The coefficient of the KL in the reward", algo.KL_CONTROLLERS),
        ("Rollout correction", [field.name for field in fields(RolloutCorrection)]),
    ],
)
def test_a_table_has_every_name_of_the_code_and_no_other(heading, there):
    assert sorted(names(heading)) == sorted(there)


def test_every_default_of_the_configuration_is_the_schema_s():
    for heading in ("Entropy and KL in the loss", "Value loss", "Shaping and filters", "Rollout correction"):
        prefix = "algorithm.rollout_correction." if heading == "Rollout correction" else ""
        for row in table(section(heading)):
            (key,), (value,) = code_spans(row[0]), code_spans(row[1])
            assert OmegaConf.from_dotlist([f"x={value}"]).x == default_of(prefix + key), key
    for row in table(section("The coefficient of the KL in the reward")):
        for key, value in settings(row[3]).items():
            assert value == default_of(key), key
    assert default_of("algorithm.use_kl_in_reward") is False
    assert default_of("algorithm.kl_penalty") == "kl"
    assert default_of("actor.loss_scale_factor") == "${data.max_response_length}"
    assert default_of("critic.loss_agg_mode") == "${actor.loss_agg_mode}"
    assert default_of("actor.loss_agg_mode") == names("Aggregation")[0]


def test_all_that_shapes_and_filters_is_there():
    wanted = {f"algorithm.overlong_buffer.{field.name}" for field in fields(OverlongBuffer)}
    wanted |= {f"algorithm.filter_groups.{field.name}" for field in fields(FilterGroups)}
    assert set(names("Shaping and filters")) == wanted | {"algorithm.advantage_clip", "algorithm.overlong_filtering"}


def test_every_key_of_the_algorithm_is_on_the_page():
    assert all(field.name in PAGE for field in fields(Algorithm))


def test_every_key_that_the_page_names_is_one():
    prefixes = ("actor.", "critic.", "algorithm.", "rollout.", "data.", "trainer.", "reward.", "model.")
    for span in code_spans(PAGE):
        key = span.partition("=")[0]
        if key.startswith(prefixes):
            assert key in leaf_types() or key in groups() or mapping_of(key), span


def test_every_file_that_the_page_names_is_there():
    paths = {span for span in code_spans(PAGE) if re.fullmatch(r"[\w/]+\.py", span)}
    assert paths and all((ROOT / path).is_file() for path in paths)


def test_every_row_says_when_to_use_it_and_papers_are_links():
    for heading in ("Policy losses", "KL estimators", "Aggregation", "Advantage estimators"):
        assert all(row[-1] for row in table(section(heading)))
    bare = re.sub(r"\[[^\]]*\]\([^)]*\)", "", re.sub(r"```.*?```", "", PAGE, flags=re.DOTALL))
    assert not re.findall(r"\b\d{4}\.\d{5}\b", bare)
    for label, link in re.findall(r"\[(\d{4}\.\d{5})\]\(([^)]*)\)", PAGE):
        assert link == f"https://arxiv.org/abs/{label}"


def test_the_advice_of_the_page_is_that_of_the_rules():
    rules = [name for row in table(section("What to change")) for name in code_spans(row[2])]
    assert sorted(rules) == sorted(rule.name for rule in RULES)


# the files of the page


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a reader who has saved every file of the page; what they register is gone afterwards."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    tables = [algo.POLICY_LOSSES, algo.ADV_ESTIMATORS, algo.KL_ESTIMATORS, rewards.REWARDS]
    before = [dict(table) for table in tables]
    yield tmp_path
    for table, old in zip(tables, before, strict=True):
        table.clear()
        table.update(old)


def example() -> Batch:
    """Two samples of 1 + 2 and 1 + 1 tokens."""
    mask = torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0])
    rows = {"score": torch.tensor([1.0, 0.0]), "group": torch.tensor([0, 1])}
    old = torch.tensor([0.0, -1.0, -2.0, 0.0, -3.0])
    return Batch(torch.arange(5), torch.tensor([3, 2]), {"response_mask": mask, "old_log_probs": old}, rows)


@pytest.mark.parametrize("words", COMMANDS, ids=list(FILES))
def test_the_commands_of_the_page_are_a_method(desk, words):
    command, *overrides = words
    assert command == "train"
    config, warnings = load_config([*BASE, *overrides])
    assert not warnings
    load_plugins(config.algorithm.plugins)
    method = make_algorithm(config)
    assert method.actor.loss.policy_loss == config.algorithm.policy_loss_fn
    assert set(config.reward.fn) <= set(rewards.REWARDS)


def test_the_file_of_the_page_computes_what_it_says(desk):
    load_plugins(["my_losses.py"])
    batch, _ = estimate(example(), adv_estimator="batch_mean", adv_estimator_args={"scale": 2.0})
    assert batch.columns["advantages"].tolist() == [0.0, 1.0, 1.0, 0.0, -1.0]
    assert batch.columns["returns"].tolist() == [0.0, 1.0, 1.0, 0.0, 0.0]

    loss = ActorLoss("spring", args={"strength": 0.3}, use_kl_loss=True, kl_loss_coef=2.0, kl_loss_type="root")
    log_probs = torch.tensor([0.0, -1.5, -2.0, 0.0, -3.0], requires_grad=True)
    batch = batch.with_columns(ref_log_probs=batch.columns["old_log_probs"])
    found = loss(step_columns(batch, loss=loss, agg_mode="token-sum"), {"log_probs": log_probs})
    policy = 0.15 * 0.25 - torch.tensor(-0.5).exp().item() - 1 + 1
    assert found.loss.item() == pytest.approx(policy + 2 * (1.25**0.5 - 1))
    assert found.stats["actor/spring"].result() == pytest.approx(0.25 / 3)

    reward = rewards.load_reward("brief")
    answer = Completion([1, 2], [0.0, 0.0], "stop", (VersionSpan(0, 0, 2),), " 46")
    prompt = Prompt(uid="0", token_ids=[1], text="12+34=", ground_truth="46", data_source="sums", extra={})
    assert reward(prompt, answer) == {"score": 0.98, "right": True}


def test_each_function_of_the_file_is_written_in_a_few_lines():
    assert len(FILES["my_losses.py"].splitlines()) <= 34
    for text in re.split(r"\n\n\n", FILES["my_losses.py"])[1:]:
        assert len(text.strip().splitlines()) <= 7


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_the_documented_loss_of_the_page_is_ppo_without_dual_clip(desk, mode):
    load_plugins(["my_documented_loss.py"])
    batch = example().with_columns(advantages=torch.tensor([0.0, 1.0, -2.0, 0.0, 3.0]))
    values = []
    for loss in (ActorLoss("documented_clip", args={"epsilon": 0.2}), ActorLoss("ppo", clip_c="off")):
        log_probs = torch.tensor([0.0, -0.5, -1.5, 0.0, -3.1], requires_grad=True)
        loss(step_columns(batch, loss=loss, agg_mode=mode), {"log_probs": log_probs}).loss.backward()
        values.append(log_probs.grad)
    torch.testing.assert_close(*values)
