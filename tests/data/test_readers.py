import json

import datasets
import pytest

from megarl.data import FILE_KINDS
from megarl.data.readers import content_digest, read_rows

ROWS = [{"prompt": "1+1=", "ground_truth": "2"}, {"prompt": "1+2=", "ground_truth": "3"}]


@pytest.fixture
def jsonl(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(ROWS[0]) + "\n\n" + json.dumps(ROWS[1]) + "\n")
    return path


def test_jsonl_rows_know_their_line_and_empty_lines_are_skipped(jsonl):
    rows = read_rows(str(jsonl), FILE_KINDS)
    assert [row.fields for row in rows] == ROWS
    assert [row.where for row in rows] == [f"{jsonl}:1", f"{jsonl}:3"]


def test_several_files_are_read_in_order(jsonl, tmp_path):
    other = tmp_path / "b.jsonl"
    other.write_text('{"prompt": "9"}\n')
    rows = read_rows([str(other), str(jsonl)], FILE_KINDS)
    assert [row.fields["prompt"] for row in rows] == ["9", "1+1=", "1+2="]


def test_parquet_and_datasets_folder_give_the_same_rows(tmp_path):
    dataset = datasets.Dataset.from_list(ROWS)
    dataset.to_parquet(tmp_path / "a.parquet")
    dataset.save_to_disk(tmp_path / "folder")
    for name in ("a.parquet", "folder"):
        rows = read_rows(str(tmp_path / name), FILE_KINDS)
        assert [row.fields for row in rows] == ROWS
        assert rows[1].where == f"{tmp_path / name}:2"


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("bad.jsonl", b'{"a": 1}\n{"a": \n', r"bad\.jsonl:2: not JSON \(.*\); expected one JSON object a line"),
        ("latin.jsonl", b'{"a": "\xe9"}\n', r"latin\.jsonl:1: not JSON \(.*utf-8.*\); expected one JSON object a line"),
        ("list.jsonl", b"[1, 2]\n", r"list\.jsonl:1: a JSON list; expected one JSON object a line"),
        ("empty.jsonl", b"\n", r"empty\.jsonl: no rows"),
        ("a.csv", b"x", r"a\.csv: unknown kind of file; expected \.jsonl"),
        ("plain", b"x", r"plain: unknown kind of file; expected \.jsonl"),
        ("a.parquet", b"nonsense", r"a\.parquet: not a parquet file"),
    ],
)
def test_a_bad_file_is_named_in_one_sentence(tmp_path, name, content, sentence):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=sentence):
        read_rows(str(tmp_path / name), FILE_KINDS)


def test_a_missing_file_and_a_wrong_folder_are_named(tmp_path):
    with pytest.raises(ValueError, match="gone.jsonl: no such file or folder"):
        read_rows(str(tmp_path / "gone.jsonl"), FILE_KINDS)
    with pytest.raises(ValueError, match="not a folder of `datasets.save_to_disk`"):
        read_rows(str(tmp_path), FILE_KINDS)
    datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)}).save_to_disk(tmp_path / "both")
    with pytest.raises(ValueError, match=r"a folder of several splits; name one of them \(train\)"):
        read_rows(str(tmp_path / "both"), FILE_KINDS)


def test_the_digest_follows_the_content_and_not_the_name(jsonl, tmp_path):
    copy = tmp_path / "copy.jsonl"
    copy.write_bytes(jsonl.read_bytes())
    assert content_digest(str(copy)) == content_digest([str(jsonl)])
    copy.write_bytes(jsonl.read_bytes() + b" ")
    assert content_digest(str(copy)) != content_digest(str(jsonl))
    assert content_digest(str(tmp_path)) == content_digest(str(tmp_path))
