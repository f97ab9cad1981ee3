"""Files of prompts and examples with anything in them: rows, or a sentence with file and line."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
from bad_input import Cases, examples, read_refusal
from hypothesis import given
from hypothesis import strategies as st

from megarl.data.examples.tiny import tiny_tokenizer
from megarl.data.prompts import Prompts, RowSettings
from megarl.data.sft import SftExamples

GOOD = {"prompt": "1+1=", "ground_truth": "2", "response": "2"}
FIELDS = st.sampled_from(
    [
        *("prompt", "ground_truth", "response", "messages", "question", "answer", "reward_model", "data_source"),
        *(
            "images",
            "role",
            "content",
            "type",
            "text",
            "extra_info",
            "",
            "tools",
            "tool_calls",
            "function",
            "arguments",
        ),
    ]
)
SCALARS = st.none() | st.booleans() | st.sampled_from([0, -1, 10**400, 1e308, float("nan"), float("inf")]) | (
    st.sampled_from(["", "user", "assistant", "system", "#### 3", "image_url", "\x00", "\ud800", "x" * 999])
    | st.text(max_size=5)
)  # fmt: skip
ROWS = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(FIELDS, inner, max_size=4), max_leaves=6
)
Reader = Callable[[Path], Any]


@pytest.fixture(scope="module")
def readers() -> tuple[Reader, Reader]:
    """Of prompts and of examples."""
    tokenizer = tiny_tokenizer()
    return (
        lambda file: Prompts(str(file), tokenizer, RowSettings(32)).visit(0),
        lambda file: SftExamples(str(file), tokenizer, RowSettings(64)).take(1),
    )


def tried(cases: Cases, read: Reader, file: Path) -> bool:
    """The file is read, or refused by its name.  Whether it was read."""
    cases.add()
    try:
        read(file)
    except ValueError as error:
        read_refusal(error, str(file))
        return False
    return True


LINES = (st.dictionaries(FIELDS, ROWS, max_size=5) | ROWS).map(lambda row: json.dumps(row).encode())


@examples(180)
@given(line=LINES | st.binary(max_size=20))
def test_bad_input_any_json_and_any_bytes_in_a_line(
    cases: Cases, tmp_path: Path, readers: tuple[Reader, Reader], line: bytes
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(json.dumps(GOOD).encode() + b"\n" + line + b"\n")
    for read in readers:
        tried(cases, read, file)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"prompt": "\xff"}', "not JSON"),
        (b"\xef\xbb\xbf\xfe", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'{"prompt": ' * 50_000, "not JSON"),
        (b'{"prompt": "\\ud800"}', "half of a character"),
        (b'{"prompt": [{"role": "user", "content": "\\udfff"}]}', "half of a character"),
        (b"9" * 5_000, "not JSON"),
        (b"{'prompt': 'a'}", "not JSON"),
        (b'{"prompt": "a"} {"prompt": "b"}', "not JSON"),
        (b'"prompt"', "a JSON str"),
        (b"x" * 10_000_000, "not JSON"),
        (b'{"prompt": "' + b"1" * 10_000_000, "not JSON"),
        (b'{"x": "' + b"1" * 10_000_000 + b'"}', "no prompt"),
        (b'{"prompt": 1}', "prompt is a int"),
        (b'{"prompt": ""}', "empty"),
        (b'{"prompt": []}', "expected a string or a list of chat messages"),
        (b'{"prompt": [{"role": "user"}]}', "is not"),
        (b'{"prompt": [{"role": 1, "content": "a"}]}', "is not"),
        (b'{"prompt": "a", "images": ["b"]}', "more than text"),
    ],
    ids=range(19),
)
def test_bad_input_lines_are_named_with_their_number(
    cases: Cases, tmp_path: Path, readers: tuple[Reader, Reader], line: bytes, said: str
) -> None:
    cases.add()
    file = tmp_path / "rows.jsonl"
    file.write_bytes(json.dumps(GOOD).encode() + b"\n\n" + line + b"\n")
    with pytest.raises(ValueError, match=said) as caught:
        readers[0](file)
    read_refusal(caught.value, f"{file}:3: ")


def test_bad_input_equal_rows_and_ids_are_prompts_of_their_own(cases: Cases, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    for extra in ({}, {"id": 1}, {"uid": "0-0"}, {"uid": None}):
        cases.add()
        file.write_text(f"{json.dumps(GOOD | extra)}\n" * 3)
        prompts = Prompts(str(file), tiny_tokenizer(), RowSettings(32))
        assert len({prompts.visit(number).uid for number in range(3)}) == 3


def test_bad_input_a_file_that_was_cut_anywhere(cases: Cases, tmp_path: Path, readers: tuple[Reader, Reader]) -> None:
    whole = f"{json.dumps(GOOD)}\n{json.dumps(GOOD | {'prompt': 'é'})}\n".encode()
    file = tmp_path / "rows.jsonl"
    read = readers[0]
    ends = {len(whole), len(whole) - 1, whole.index(b"\n"), whole.index(b"\n") + 1}
    for end in range(len(whole) + 1):
        file.write_bytes(whole[:end])
        assert tried(cases, read, file) == (end in ends)


def test_bad_input_a_parquet_file_that_was_cut_or_changed(
    cases: Cases, tmp_path: Path, readers: tuple[Reader, Reader]
) -> None:
    file, read = tmp_path / "rows.parquet", readers[0]
    datasets.Dataset.from_list([GOOD, GOOD]).to_parquet(file)
    whole = file.read_bytes()
    for end in range(0, len(whole), len(whole) // 40):
        file.write_bytes(whole[:end])
        assert not tried(cases, read, file)
    for at in range(0, len(whole), len(whole) // 60):
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :])
        tried(cases, read, file)


def test_bad_input_a_datasets_folder_that_was_changed(
    cases: Cases, tmp_path: Path, readers: tuple[Reader, Reader]
) -> None:
    folder, read = tmp_path / "folder", readers[0]
    datasets.Dataset.from_list([GOOD, GOOD]).save_to_disk(folder)
    for part in sorted(folder.iterdir()):
        whole = part.read_bytes()
        for content in (b"", b"{}", whole[: len(whole) // 2], b"\xff" * 9, b"[]"):
            part.write_bytes(content)
            tried(cases, read, folder)
        part.unlink()
        tried(cases, read, folder)
        part.write_bytes(whole)
    assert tried(cases, read, folder)


def test_bad_input_paths_that_are_no_files_of_rows(
    cases: Cases, tmp_path: Path, readers: tuple[Reader, Reader]
) -> None:
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "blank.jsonl").write_text("\n \n")
    (tmp_path / "folder.jsonl").mkdir()
    (tmp_path / "loop.jsonl").symlink_to(tmp_path / "loop.jsonl")
    (tmp_path / "gone.jsonl").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe.jsonl")
    names = ("empty.jsonl", "blank.jsonl", "folder.jsonl", "loop.jsonl", "gone.jsonl", "pipe.jsonl", "absent.jsonl")
    for name in (*names, "n" * 300, "a\0b.jsonl", "é\udcff.jsonl"):
        for read in readers:
            cases.add()
            with pytest.raises(ValueError) as caught:
                read(tmp_path / name)
            read_refusal(caught.value, str(tmp_path))


def test_bad_input_a_saved_position_is_not_used_with_fewer_rows(cases: Cases, tmp_path: Path) -> None:
    file, tokenizer = tmp_path / "rows.jsonl", tiny_tokenizer()
    line = f"{json.dumps(GOOD)}\n"
    file.write_text(line * 5)
    state = SftExamples(str(file), tokenizer, RowSettings(64)).state_dict()
    for number in range(1, 5):
        cases.add()
        file.write_text(line * number)
        with pytest.raises(ValueError, match="belongs to other data") as caught:
            SftExamples(str(file), tokenizer, RowSettings(64)).load_state_dict(state)
        read_refusal(caught.value)
