"""README, book and the loss layer's page: what they name exists, and what is made from the code is up to date."""

import ast
import re
from collections.abc import Iterable
from dataclasses import fields
from fnmatch import fnmatchcase

import pytest
from omegaconf import OmegaConf
from readme_blocks import BOOK, FRONT, OTHERS, PAGE, ROOT, blocks, code_spans, commands, our_words, section
from test_floors import FLOORS
from write_pages import PAGES
from written_metrics import is_written

from megarl import algo, cli
from megarl.config import Config, aliases
from megarl.config.aliases import canonical
from megarl.config.keys import ELSEWHERE, general, groups, mapping_of, schema_keys, type_of
from megarl.config.schema.algorithm import Algorithm, FilterGroups, OverlongBuffer, RolloutCorrection
from megarl.config.settings import from_command_line
from megarl.config.verl import runs
from megarl.metrics.advice.rules import RULES
from megarl.metrics.trackers.console import COLUMNS

ALGO = (ROOT / "megarl/algo/README.md").read_text()
ARCHITECTURE = BOOK["architecture.md"]
HOW_TO_ADD = {name: text for name, text in BOOK.items() if name.startswith("how_to_add/")}
KEY = re.compile(rf"(?:{'|'.join(vars(Config()))})\.[\w.]+(?:\.\*)?")


def part(page: str, heading: str) -> str:
    """The text below a heading, up to the next one."""
    _, found, rest = page.partition(f"\n## {heading}\n")
    assert found, f"there is no section {heading}"
    return rest.partition("\n## ")[0]


def table(text: str) -> list[list[str]]:
    """The cells of each row, without the head; every row has as many as the head."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip("|"))] for line in lines]
    assert len({len(row) for row in rows}) == 1, "a table that renders"
    return rows[2:]


def names(heading: str) -> list[str]:
    """Of the first column of the loss layer's page."""
    return [name for row in table(part(ALGO, heading)) for name in code_spans(row[0])]


def is_key(key: str) -> bool:
    return bool(type_of(key) or mapping_of(key) or key.removesuffix(".*") in groups())


@pytest.mark.parametrize("name", PAGES)
def test_a_page_that_is_made_from_the_code_is_up_to_date(name: str) -> None:
    assert (ROOT / "docs" / name).read_text() == PAGES[name](), "run: python docs/write_pages.py"


# ---- files, folders and functions


def test_every_link_leads_to_a_file() -> None:
    top = [
        (ROOT, (ROOT / name).read_text()) for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
    ]
    for place, text in (*top, *(((ROOT / "docs" / name).parent, text) for name, text in BOOK.items())):
        for target in re.findall(r"\]\(([^)#]+)\)", text):
            assert target.startswith("https://") or (place / target).exists(), target
    index = set(re.findall(r"\(([\w/]+\.md)\)", BOOK["README.md"]))
    assert index == BOOK.keys() - {"README.md"}, "pages that the index does not have"
    assert FRONT.count("\n") <= 120 and len(FRONT.split()) <= 900, "the front page fits on two screens"


def missing(paths: Iterable[str]) -> list[str]:
    return [path for path in paths if not (ROOT / path).exists()]


def test_every_path_that_a_page_names_is_there() -> None:
    kept = [span for span in code_spans(BOOK["guarantees.md"]) if span.startswith("tests/")]
    assert len(kept) >= 10 and not missing(kept), "tests that keep a promise"
    for page, text in HOW_TO_ADD.items():
        paths = {span.partition(" : ")[0] for span in code_spans(text)}
        paths = {path for path in paths if path.startswith(("megarl/", "tests/", "configs/"))}
        assert len(paths) >= 2 and not missing(paths), page
    paths = {span for span in code_spans(ALGO) if re.fullmatch(r"[\w/]+\.py", span)}
    assert paths and not missing(paths)
    scripts = set(re.findall(r"bash (launch/\S+\.sh)", PAGE))
    assert scripts >= {"launch/quickstart.sh", "launch/test.sh", "launch/sglang_cpu.sh"} and not missing(scripts)
    there = {path.name for path in (ROOT / "launch").iterdir() if path.suffix in (".sh", ".sbatch")}
    assert not [name for name in there if name not in PAGE], "scripts that no page names"


def test_every_folder_of_the_tree_exists() -> None:
    named = [span for line in blocks(section("The ring"))[1].text.splitlines() for span in line.split() if "/" in span]
    folders = [name for name in named if name.endswith("/")]
    places = (ROOT, ROOT / "megarl", ROOT / "launch", ROOT / "configs")
    assert not [name for name in folders if not any((place / name).is_dir() for place in places)]
    rooms = {path.name for path in (ROOT / "megarl").iterdir() if (path / "__init__.py").exists()}
    assert not rooms - {name.rstrip("/").rpartition("/")[2] for name in folders}, "rooms that the tree does not name"


def test_the_floors_of_the_page_are_those_that_are_checked() -> None:
    text = ARCHITECTURE.partition("## The life of a sample")[0]
    rows = [line.split("|")[1:3] for line in text.splitlines() if line.startswith("| ")][2:]
    assert {int(floor): code_spans(rooms) for floor, rooms in rows} == {f: rooms.split() for f, rooms in FLOORS.items()}


def name_of(node: ast.stmt) -> str | None:
    """Of a class, a function, or a table."""
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return node.target.id
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        return node.targets[0].id
    return getattr(node, "name", None)


def test_every_function_that_a_page_names_with_its_file_exists() -> None:
    pages = (ARCHITECTURE, *HOW_TO_ADD.values())
    steps = [span.split(" : ") for text in pages for span in code_spans(text) if " : " in span]
    assert len(steps) >= 35
    for path, name in steps:
        scope: list[ast.stmt] = ast.parse((ROOT / path).read_text()).body
        for each in name.split("."):
            found = [node for node in scope if name_of(node) == each]
            assert found, f"{path} has no {name}"
            scope = getattr(found[0], "body", [])


# ---- names of the code


def test_the_legend_has_every_word_of_the_consoles_line_with_its_metric() -> None:
    rows = table(part(BOOK["glossary.md"], "The console's line"))
    legend = {(label.strip("`"), metric) for label, cell, _ in rows for metric in code_spans(cell)}
    assert legend == {(label, metric) for label, metric, _ in COLUMNS}


def test_every_key_on_the_pages_exists() -> None:
    wanted = re.compile(rf"(?:{'|'.join(vars(Config()))})\.[\w.*]+(?:=\S+)?")
    spans = [span for span in code_spans(our_words() + ALGO) if wanted.fullmatch(span) and not span.endswith(".py")]
    keys = [span.partition("=")[0] for span in spans]
    assert len(keys) > 40
    of_verl = aliases._RULES | aliases._SFT_RULES | runs.SFT_PLACES
    for key in keys:
        known = canonical(key)
        assert is_key(known.key) or any(fnmatchcase(key, pattern) for pattern in of_verl), key


def test_a_name_of_trl_is_sent_to_the_key_that_is_beside_it_on_the_page() -> None:
    rows = [line.split(" | ") for line in BOOK["coming_from/trl.md"].splitlines() if line.startswith("| `")]
    beside: dict[str, str] = {}  # name -> all that is beside it, in one row or in several
    for theirs, ours in (row[:2] for row in rows):
        for name in set(re.findall(r"`(\w+)[=`]", theirs)) & ELSEWHERE.keys():
            beside[name] = beside.get(name, "") + ours
    assert len(beside) > 30
    for name, ours in beside.items():
        assert ELSEWHERE[name].rpartition(".")[2] in ours, (name, ELSEWHERE[name], ours)


def test_lists_of_the_pages_are_those_of_the_code() -> None:
    assert {command.words[0] for command in commands()} == set(cli.COMMANDS)
    assert sorted(names("The coefficient of the KL in the reward")) == sorted(algo.KL_CONTROLLERS)
    assert sorted(names("Rollout correction")) == sorted(field.name for field in fields(RolloutCorrection))
    shaping = {f"algorithm.overlong_buffer.{field.name}" for field in fields(OverlongBuffer)}
    shaping |= {f"algorithm.filter_groups.{field.name}" for field in fields(FilterGroups)}
    shaping |= {"algorithm.advantage_clip", "algorithm.overlong_filtering"}
    assert set(names("Shaping and filters")) == shaping
    assert all(field.name in ALGO for field in fields(Algorithm))
    advice = [name for row in table(part(ALGO, "What to change")) for name in code_spans(row[2])]
    assert sorted(advice) == sorted(rule.name for rule in RULES)


def test_every_symptom_has_metrics_that_a_run_writes_and_advice_that_it_gives() -> None:
    text = BOOK["troubleshooting.md"].partition("## By symptom")[2].partition("\n## ")[0]
    assert all(word in text for word in ("flat", "dips", "collapses", "disagree", "memory", "idle"))
    metrics = [span for span in code_spans(text) if re.fullmatch(r"[a-z_]+(/[a-z_]+)+", span)]
    assert len(metrics) > 25
    assert not [metric for metric in metrics if not is_written(metric)]
    advice = [span for span in code_spans(text) if re.fullmatch(r"[a-z_]+", span)]
    assert len(advice) > 15
    assert set(advice) <= {rule.name for rule in RULES}


# ---- the loss layer's page


def value_of(text: str) -> object:
    """As YAML has it."""
    return OmegaConf.from_dotlist([f"x={text}"]).x


def test_every_default_of_the_page_is_the_schema_s() -> None:
    whole = OmegaConf.structured(Config)

    def default_of(key: str) -> object:
        found = OmegaConf.to_container(whole, resolve=False)
        for each in key.split("."):
            found = found[each]
        return found

    for heading in ("Entropy and KL in the loss", "Value loss", "Shaping and filters", "Rollout correction"):
        prefix = "algorithm.rollout_correction." if heading == "Rollout correction" else ""
        for row in table(part(ALGO, heading)):
            (key,), (value,) = code_spans(row[0]), code_spans(row[1])
            assert value_of(value) == default_of(prefix + key), key
    for row in table(part(ALGO, "The coefficient of the KL in the reward")):
        for key, is_set, value in (span.partition("=") for span in code_spans(row[3])):
            assert default_of(key) == (value_of(value) if is_set else None), key
    assert default_of("algorithm.use_kl_in_reward") is False
    assert default_of("algorithm.kl_penalty") == "kl"
    assert default_of("actor.loss_scale_factor") == "${data.max_response_length}"
    assert default_of("critic.loss_agg_mode") == "${actor.loss_agg_mode}"
    assert default_of("actor.loss_agg_mode") == names("Aggregation")[0]


def test_every_row_says_when_to_use_it_and_papers_are_links() -> None:
    for heading in ("Policy losses", "KL estimators", "Aggregation", "Advantage estimators"):
        assert all(row[-1] for row in table(part(ALGO, heading)))
    bare = re.sub(r"\[[^\]]*\]\([^)]*\)", "", re.sub(r"```.*?```", "", ALGO, flags=re.DOTALL))
    assert not re.findall(r"\b\d{4}\.\d{5}\b", bare)
    for label, link in re.findall(r"\[(\d{4}\.\d{5})\]\(([^)]*)\)", ALGO):
        assert link == f"https://arxiv.org/abs/{label}"


# ---- the pages for those who come from another framework


def keys_of(page: str) -> list[str]:
    """The spans of a page that are keys of ours, with their values."""
    spans = code_spans(our_words(page))
    return [span for span in spans if KEY.fullmatch(span.partition("=")[0]) and not is_written(span)]


@pytest.mark.parametrize("page", OTHERS)
def test_every_key_of_ours_is_one_by_its_own_name_and_takes_its_value(page: str) -> None:
    named = {span.partition("=")[0] for span in keys_of(page)}
    assert len(named) > 60
    assert not [key for key in named if not is_key(key)]
    set_to = sorted({span for span in keys_of(page) if "=" in span and "FILE" not in span and "NAME" not in span})
    assert len(set_to) > 15
    for word in set_to:
        layer = from_command_line([word])
        assert not layer.faults
        (setting,) = layer.settings
        choices = schema_keys()[general(setting.key)].record.choices.names
        assert not choices or setting.value in choices, word


@pytest.mark.parametrize("page", OTHERS)
def test_a_table_has_two_columns_names_nothing_twice_and_has_metrics_that_a_run_writes(page: str) -> None:
    rows = [line.strip("|").split("|") for line in BOOK[page].splitlines() if line.startswith("| ")]
    assert {len(row) for row in rows} == {2}
    firsts = [row[0].strip() for row in rows if row[1].strip() not in ("here", "---")]
    assert len(firsts) == len(set(firsts)) > 60
    metrics = [span for span in code_spans(our_words(page).partition("\n## Metrics\n")[2]) if "/" in span]
    assert len(metrics) > 6
    assert not [metric for metric in metrics if not is_written(metric.replace("NAME", "exact"))]
