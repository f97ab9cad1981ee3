"""The pages for those who come from another framework: what they say of our keys, values, metrics and files holds."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
from readme_blocks import BOOK, OTHERS, blocks, code_spans, our_words
from written_metrics import is_written

from megarl.config import Config
from megarl.config.keys import groups, mapping_of, type_of
from megarl.config.settings import from_command_line
from megarl.config.validate.values import CHOICES, OPEN_CHOICES
from megarl.rewards import load_reward
from megarl.sample import Completion, Prompt, VersionSpan

KEY = re.compile(rf"(?:{'|'.join(vars(Config()))})\.[\w.]+(?:\.\*)?")


def keys(page: str) -> list[str]:
    """The spans of a page that are keys of ours, with their values."""
    spans = code_spans(our_words(page))
    return [span for span in spans if KEY.fullmatch(span.partition("=")[0]) and not is_written(span)]


@pytest.mark.parametrize("page", OTHERS)
def test_every_key_of_ours_is_one_by_its_own_name(page: str) -> None:
    named = {span.partition("=")[0] for span in keys(page)}
    assert len(named) > 60
    for key in named:
        assert type_of(key) or mapping_of(key) or key.removesuffix(".*") in groups(), key


@pytest.mark.parametrize("page", OTHERS)
def test_every_value_of_a_key_is_taken(page: str) -> None:
    set_to = sorted({span for span in keys(page) if "=" in span and "FILE" not in span and "NAME" not in span})
    assert len(set_to) > 15
    for word in set_to:
        layer = from_command_line([word])
        assert not layer.faults
        (setting,) = layer.settings
        choices = CHOICES.get(setting.key) or OPEN_CHOICES.get(setting.key)
        assert choices is None or setting.value in choices, word


@pytest.mark.parametrize("page", OTHERS)
def test_every_metric_of_ours_is_one_that_a_run_writes(page: str) -> None:
    table = our_words(page).partition("\n## Metrics\n")[2]
    metrics = [span for span in code_spans(table) if "/" in span]
    assert len(metrics) > 6
    assert not [metric for metric in metrics if not is_written(metric.replace("NAME", "exact"))]


@pytest.mark.parametrize("page", OTHERS)
def test_a_table_has_two_columns_and_names_nothing_twice(page: str) -> None:
    rows = [line.strip("|").split("|") for line in BOOK[page].splitlines() if line.startswith("| ")]
    assert {len(row) for row in rows} == {2}
    firsts = [row[0].strip() for row in rows if row[1].strip() not in ("here", "---")]
    assert len(firsts) == len(set(firsts)) > 60


def score(name: str, text: str) -> float:
    reward: Any = load_reward(name)
    prompt = Prompt("1", [1], "12+34=", ground_truth="46", data_source="sums", extra={"level": 2})
    found = reward(prompt, Completion([1], [0.0], "stop", (VersionSpan(0, 0, 1),), text))
    return float(asyncio.run(found) if asyncio.iscoroutine(found) else found)


@pytest.mark.parametrize("file", ["reward_of_slime.py", "reward_of_trl.py"])
def test_a_reward_of_the_other_framework_runs_as_the_page_has_it(file: str) -> None:
    (text,) = [block.text for page in OTHERS for block in blocks(BOOK[page]) if block.file == file]
    Path(file).write_text(text)
    assert [score(f"{file}:reward", answer) for answer in (" 46", "47")] == [1.0, 0.0]
