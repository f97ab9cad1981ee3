"""Names of evaluation sets of files without data sources."""

import pytest

from megarl.data.prompts import distinct_names


@pytest.mark.parametrize(
    ("files", "taken", "names"),
    [
        (["a.jsonl", "b/c.parquet"], [], ["a", "c"]),
        (["easy/test.jsonl", "hard/test.jsonl", "dev.jsonl"], [], ["easy/test", "hard/test", "dev"]),
        (["a/x/test.jsonl", "b/x/test.jsonl", "c/test.jsonl"], [], ["a/x/test", "b/x/test", "c/test"]),
        (["d/test.jsonl", "d/test.parquet"], [], ["test.jsonl", "test.parquet"]),
        (["d/gsm8k.jsonl"], ["gsm8k"], ["gsm8k.jsonl"]),  # rows with a source of that name are another set
        (["/v/test.jsonl", "/test.jsonl"], [], ["v/test", "/test.jsonl"]),
    ],
)
def test_a_file_is_named_by_the_shortest_part_of_its_path_that_no_other_has(files, taken, names) -> None:
    assert list(distinct_names(files, taken).values()) == names
