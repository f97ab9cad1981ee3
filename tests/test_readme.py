"""README and book are run: their files are saved as a reader would, their commands composed, their paths looked up."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from config_helpers import tables_kept
from gsm8k_shaped import ASK
from readme_blocks import BOOK, FRONT, PAGE, ROOT, Command, blocks, code_spans, commands, files, our_words, section

from megarl import cli
from megarl.algo import ActorLoss, estimate, load_plugins
from megarl.batch import Batch
from megarl.config import Config, Examined, load_config
from megarl.config.aliases import Canonical, canonical, has_rule
from megarl.config.keys import groups, mapping_of, type_of
from megarl.data.examples.tiny import tiny_tokenizer
from megarl.data.prompts import Prompts
from megarl.rewards import REWARDS, load_reward
from megarl.rewards.result import to_result
from megarl.sample import Completion, Prompt, VersionSpan


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a reader who has saved every file of the page and has the quickstart behind him."""
    for name, text in files().items():
        (tmp_path / name).write_text(text)
    (tmp_path / "runs/quickstart/checkpoints/step_00000040").mkdir(parents=True)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def read(file: str) -> list[Prompt]:
    prompts = Prompts(file, tiny_tokenizer(), max_prompt_length=256, shuffle=False)
    return prompts.all()


def test_every_row_shape_of_the_page_is_read(desk: Path) -> None:
    text, messages, gsm8k, verl = read("my_data.jsonl")
    assert [prompt.ground_truth for prompt in (text, messages, gsm8k, verl)] == ["46"] * 4
    assert (text.text, text.data_source) == ("12+34=", "sums")
    assert [message["role"] for message in messages.text] == ["system", "user"]
    assert gsm8k.text == [{"role": "user", "content": "Ann has 12 pens and buys 34. How many?"}]
    assert verl.extra["extra_info"] == {"level": 2}


def test_the_gsm8k_download_writes_what_the_recipe_reads(desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    rows = [{"question": "Ann has 12 pens and buys 34. How many?", "answer": "12 + 34 = 46\n#### 1,046"}]
    monkeypatch.setattr(datasets, "load_dataset", lambda name, part, split: datasets.Dataset.from_list(rows))
    exec(compile(files()["get_gsm8k.py"], "get_gsm8k.py", "exec"), {})
    config, _ = load_config(["recipe=gsm8k_qwen2_5_0_5b_1gpu"])
    asked = f"{rows[0]['question']} {ASK}"  # for the answer after the mark, which alone the recipe's reward pays for
    assert config.reward.fn == ["gsm8k_strict"]
    for file in [*config.data.train_files, *config.data.val_files]:
        (prompt,) = read(file)
        assert (prompt.text, prompt.ground_truth) == ([{"role": "user", "content": asked}], "1046")


def test_the_reward_of_the_page_in_five_lines(desk: Path) -> None:
    assert len(files()["my_reward.py"].splitlines()) <= 5
    reward = load_reward("my_reward.py:short_and_right")
    prompt = read("my_data.jsonl")[0]

    def result(text: str) -> tuple[float, dict[str, float]]:
        found = to_result(reward(prompt, Completion([1], [0.0], "stop", (VersionSpan(0, 0, 1),), text)))
        return found.reward, found.extra

    assert result(" 46") == (1.0, {"right": 1.0})
    assert result("it must be 46") == (pytest.approx(-0.03), {"right": 0.0})


def test_the_built_in_rewards_are_those_of_the_page() -> None:
    sentence = BOOK["data_rewards_plugins.md"].partition("Built in:")[2].partition(". ")[0]
    assert code_spans(sentence) == list(REWARDS)


@pytest.fixture
def plugin(desk: Path) -> Iterator[None]:
    """The page's plug-in, loaded; gone afterwards."""
    with tables_kept():
        load_plugins(["my_loss.py", "my_estimator.py"])
        yield


def one_token_each(old_log_probs: list[float], **rows: torch.Tensor) -> Batch:
    """Sequences of a masked token and a trainable one."""
    n = len(old_log_probs)
    mask = torch.tensor([0.0, 1.0] * n)
    old = torch.stack([torch.zeros(n), torch.tensor(old_log_probs)], dim=1).flatten()
    columns = {"response_mask": mask, "old_log_probs": old}
    return Batch(torch.zeros(2 * n, dtype=torch.int64), torch.full((n,), 2), columns, rows)


def test_the_loss_of_the_page_by_hand(plugin: None) -> None:
    assert len(files()["my_loss.py"].splitlines()) <= 10
    batch = one_token_each([-1.0, -1.0])
    batch = batch.with_columns(weight=batch.columns["response_mask"] / 2, advantages=torch.tensor([0.0, 2.0, 0.0, 1.0]))
    log_probs = torch.tensor([0.0, -0.5, 0.0, -1.5], requires_grad=True)
    out = ActorLoss("my_cispo", clip_high=0.3)(batch, {"log_probs": log_probs})
    # Ratios e^0.5, cut to 1.3, and e^-0.5.
    kept = torch.tensor(-0.5).exp().item()
    assert out.loss.item() == pytest.approx((-1.3 * 2 * -0.5 + -kept * 1 * -1.5) / 2)
    assert out.stats["actor/cut"].result() == 0.5
    out.loss.backward()
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == pytest.approx([0.0, -1.3, 0.0, -kept / 2])


def test_the_estimator_of_the_page_by_hand(plugin: None) -> None:
    scores, group = torch.tensor([1.0, 0.0, 0.5, 3.0]), torch.tensor([0, 0, 0, 1])
    batch, _ = estimate(one_token_each([0.0] * 4, score=scores, group=group), adv_estimator="leave_one_out")
    # 1 - (0 + 0.5)/2, 0 - (1 + 0.5)/2, 0.5 - (1 + 0)/2, and nobody to compare with.
    assert batch.columns["advantages"].tolist() == pytest.approx([0, 0.75, 0, -0.75, 0, 0, 0, 3.0])
    assert batch.columns["returns"].tolist() == pytest.approx([0, 1, 0, 0, 0, 0.5, 0, 3])


@pytest.mark.parametrize("command", commands(), ids=lambda command: " ".join(command.words)[:60])
def test_every_command_composes_without_a_warning_or_is_refused_as_shown(
    command: Command, desk: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(cli, "_work_of", lambda _: lambda *given: seen.append(given[-1]) or 0)
    monkeypatch.setattr(cli, "_missing_files", lambda found: [])  # some are written by scripts of the page
    monkeypatch.setenv("MEGARL_TOKEN", "0" * 64)
    code = cli.main(list(command.words))
    assert (code, capsys.readouterr().err) == ((2, f"{command.error}\n") if command.error else (0, ""))
    assert len(seen) == (command.error is None)
    assert not any(each.faults for each in seen if isinstance(each, Examined)), "of trainer.check_only"


def test_the_front_page_fits_on_a_few_screens() -> None:
    assert FRONT.count("\n") <= 200


def test_every_link_leads_to_a_file() -> None:
    top = [
        (ROOT, (ROOT / name).read_text()) for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
    ]
    for place, text in (*top, *(((ROOT / "docs" / name).parent, text) for name, text in BOOK.items())):
        for target in re.findall(r"\]\(([^)#]+)\)", text):
            assert target.startswith("https://") or (place / target).exists(), target
    named = set(re.findall(r"\(docs/([\w/]+\.md)\)", FRONT))
    assert named == BOOK.keys(), "pages that the index of the book does not have"


def test_the_page_has_commands_of_every_kind() -> None:
    assert {command.words[0] for command in commands()} == set(cli.COMMANDS)


def test_the_users_file_of_the_page_lies_over_its_recipe(desk: Path) -> None:
    config, _ = load_config(["recipe=my_run.yaml"])
    assert config.algorithm.adv_estimator == "grpo"
    assert config.reward.fn == ["my_reward.py:short_and_right"]
    assert config.data.train_files == ["my_data.jsonl"]


def test_every_script_of_the_page_exists() -> None:
    scripts = set(re.findall(r"bash (launch/\S+\.sh)", PAGE))
    assert scripts >= {"launch/quickstart.sh", "launch/test.sh", "launch/sglang_cpu.sh"}
    named = {path.name for path in (ROOT / "launch").iterdir() if path.suffix in (".sh", ".sbatch")}
    assert not [name for name in named if name not in PAGE]
    assert all((ROOT / script).is_file() for script in scripts)


def test_every_folder_of_the_tree_exists() -> None:
    named = [span for line in blocks(section("The ring"))[1].text.splitlines() for span in line.split() if "/" in span]
    folders = [name for name in named if name.endswith("/")]
    places = (ROOT, ROOT / "megarl", ROOT / "launch", ROOT / "configs")
    assert not [name for name in folders if not any((place / name).is_dir() for place in places)]
    rooms = {path.name for path in (ROOT / "megarl").iterdir() if (path / "__init__.py").exists()}
    assert not rooms - {Path(name).name for name in folders}, "rooms that the README's tree does not name"


def test_every_test_that_keeps_a_promise_exists() -> None:
    kept = [span for span in code_spans(BOOK["guarantees.md"]) if span.startswith("tests/")]
    assert len(kept) >= 10
    assert not [path for path in kept if not (ROOT / path).exists()]


def test_every_key_on_the_page_exists() -> None:
    wanted = re.compile(rf"(?:{'|'.join(vars(Config()))})\.[\w.*]+(?:=\S+)?")
    spans = [span for span in code_spans(our_words()) if wanted.fullmatch(span) and not span.endswith(".py")]
    keys = [span.partition("=")[0] for span in spans]
    assert len(keys) > 40
    for key in keys:
        known = canonical(key)
        if isinstance(known, Canonical):  # else it is one of those that have no meaning here, and the page says so
            there = type_of(known.key) or mapping_of(known.key) or known.key.removesuffix(".*") in groups()
            assert there or has_rule(key), key
