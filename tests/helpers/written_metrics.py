"""Whether the package writes a metric, by its source: a constant, or an f-string and names that may fill it."""

import re
from functools import cache

from readme_blocks import ROOT

_READERS = ("metrics/advice/rules.py", "metrics/trackers/console.py", "metrics/report/")  # they only read metrics
_CONSTANT = re.compile(r'"([a-z_]+(?:/[\w@]+)+)"')
_WITH_FIELDS = re.compile(r'f"((?:[\w@/]|\{[^{}"]+\})+)"')
_NAME = re.compile(r'"([\w@/]+)"|(\w+) ?[=:]')  # a text, a keyword, or a field of a dataclass
_STATISTICS = "(mean|max|min|std)"  # the last part of a metric whose f-string has nothing constant


def is_written(metric: str) -> bool:
    constants, patterns, names = _source()
    if metric in constants:
        return True
    found = filter(None, (pattern.fullmatch(metric) for pattern in patterns))
    return any(set("/".join(match.groups()).split("/")) <= names for match in found)


@cache
def _source() -> tuple[set[str], list[re.Pattern[str]], set[str]]:
    """Names of metrics, patterns of such, and the names that may fill them."""
    package = ROOT / "megarl"
    paths = (path for path in package.rglob("*.py") if not path.relative_to(package).as_posix().startswith(_READERS))
    source = "\n".join(path.read_text() for path in paths)
    names = {part for pair in _NAME.findall(source) for text in pair for part in text.split("/")}
    patterns = {_pattern(text) for text in _WITH_FIELDS.findall(source) if "/" in re.sub(r"\{.*?\}", "", text)}
    return set(_CONSTANT.findall(source)), [re.compile(pattern) for pattern in sorted(patterns)], names


def _pattern(text: str) -> str:
    parts = re.split(r"\{.*?\}", text)
    if set(parts) == {"", "/"}:
        return rf"([\w@/]+)/{_STATISTICS}"
    return r"([\w@/]+)".join(re.escape(part) for part in parts)
