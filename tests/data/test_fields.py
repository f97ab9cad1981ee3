"""Rows of files, and the prompts and examples that their fields say."""

import json
import re
import subprocess
import sys
from time import process_time

import datasets
import pyarrow as pa
import pytest
from pyarrow import parquet

from megarl.data.fields import example_of, is_learnt, question_of
from megarl.data.readers import FILE_KINDS, Record, content_digest, read_parquet, read_rows

CHAT = [{"role": "user", "content": "hi"}]
WITH_ANSWER = [*CHAT, {"role": "assistant", "content": "hello"}]


def question(fields, *, template=True, prompt_key="prompt", ground_truth_key="ground_truth"):
    return question_of(
        Record("f.jsonl:7", fields),
        prompt_key=prompt_key,
        ground_truth_key=ground_truth_key,
        has_chat_template=template,
    )


def example(fields, *, template=True):
    return example_of(
        Record("f.jsonl:7", fields), prompt_key="prompt", response_key="response", has_chat_template=template
    )


RENAMED = {"prompt_key": "q", "ground_truth_key": "a"}
VERL = {"reward_model": {"style": "rule", "ground_truth": "42"}, "extra_info": {"index": 1}}


@pytest.mark.parametrize(
    ("fields", "keys", "text", "truth", "source", "extra"),
    [
        (
            {"prompt": "1+=", "ground_truth": "2", "data_source": "数\u3000学", "n": 3},
            {},
            "1+=",
            "2",
            "数\u3000学",
            {"n": 3},
        ),
        ({"q": "1+1=", "a": 2, "prompt": "kept"}, RENAMED, "1+1=", 2, "", {"prompt": "kept"}),  # a number stays one
        ({"prompt": CHAT, "images": None}, {}, CHAT, None, "", {"images": None}),  # as in a file of mixed rows
        ({"messages": CHAT}, {}, CHAT, None, "", {}),
        ({"prompt": CHAT, **VERL}, {}, CHAT, "42", "", VERL),
    ],
)
def test_a_rows_fields_become_a_prompt(fields, keys, text, truth, source, extra):
    got = question(fields, **keys)
    assert (got.text, got.ground_truth, got.data_source, got.extra) == (text, truth, source, extra)


@pytest.mark.parametrize("truth", ["46.0", 46.0, 0, True, [1, "a"], {"target": ["a"]}, None])
def test_a_ground_truth_stays_what_the_row_has(truth):
    for fields in ({"ground_truth": truth}, {"reward_model": {"ground_truth": truth}}):
        found = question({"prompt": "x", **fields}).ground_truth
        assert found == truth and type(found) is type(truth)
    assert question({"prompt": "x", "ground_truth": float("nan")}).ground_truth is None, "as if the row had none"


def test_gsm8k_rows_become_a_user_message_where_there_is_a_template():
    fields = {"question": "How many?", "answer": "So 1,000 #### 5.\n#### 1,005 "}
    assert question(fields).text == [{"role": "user", "content": "How many?"}]
    assert question(fields, template=False).text == "How many?"
    assert question(fields).ground_truth == "1005"
    assert question(fields).extra == {"answer": fields["answer"]}


def test_a_solution_of_gsm8k_under_a_named_key_gives_its_number_and_stays_in_the_row():
    solution = "2+2=4, #### so\n#### 1,004\n"
    for key in ("answer", "solution"):
        found = question({"question": "How many?", key: solution}, ground_truth_key=key)
        assert (found.ground_truth, found.extra) == ("1004", {key: solution})
    nested = {"reward_model": {"ground_truth": solution}}
    found = question({"prompt": "x", **nested})
    assert (found.ground_truth, found.extra) == ("1004", nested)
    for text in ("#### Geography\nIt is Paris", "#### 3 cities\nParis", "46", r"#### \frac{1}{2}"):
        assert question({"prompt": "x", "answer": text}, ground_truth_key="answer").ground_truth == text


def test_messages_keep_texts_calls_and_numbers_and_parts_of_text_are_joined():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "image": None}]
    called = {"function": {"name": "f", "arguments": '{"x": null}'}}
    rows = [
        {"role": "user", "content": parts, "name": "me", "when": {"year": 1}},
        {"role": "assistant", "tool_calls": [called], "reasoning_content": "so", "weight": 0},
        {"role": "tool", "content": "", "tool_call_id": None},
    ]
    asked, answer, response = question({"messages": rows, "tools": ["f"]}).text
    assert asked == {"role": "user", "content": "ab", "name": "me"}
    calls = [{"type": "function", "function": {"name": "f", "arguments": {"x": None}}}]
    assert answer == {
        "role": "assistant", "content": None, "reasoning_content": "so", "weight": 0, "tool_calls": calls
    }  # fmt: skip
    assert response == {"role": "tool", "content": ""}


def test_nulls_that_arrow_puts_into_objects_are_no_arguments(tmp_path):
    """Each object of a column has the fields of all of them."""
    calls = [{"function": {"name": "f", "arguments": {name: {"at": 1}}}} for name in "ab"]
    tools = [
        {"type": "function", "function": {"name": "f", "parameters": {"properties": {n: {"type": n}}}}} for n in "ab"
    ]
    rows = [
        {"messages": [*CHAT, {"role": "assistant", "content": "", "tool_calls": [call]}], "tools": [tool]}
        for call, tool in zip(calls, tools, strict=True)
    ]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "a.parquet")
    keys = {"prompt_key": "prompt", "response_key": "response", "has_chat_template": True}
    found = [example_of(row, **keys) for row in read_rows(str(tmp_path / "a.parquet"))]
    assert [one.behind[0]["tool_calls"][0]["function"]["arguments"] for one in found] == [
        {"a": {"at": 1}},
        {"b": {"at": 1}},
    ]
    assert [list(one.tools) for one in found] == [[tools[0]], [tools[1]]]


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"text": "x"}, "f.jsonl:7: no prompt; expected the key 'prompt', 'messages' or 'question', .* has 'text'"),
        ({"prompt": 3}, "f.jsonl:7: prompt is a int; expected a string or a list of chat messages"),
        ({"prompt": []}, "f.jsonl:7: prompt is a list; expected a string or a list of chat messages"),
        ({"messages": [{"role": "user"}]}, r'f.jsonl:7: messages\[0\] is not {"role": string, "content": string}'),
        ({"messages": [*CHAT, "x"]}, r'f.jsonl:7: messages\[1\] is not {"role": string'),
        (
            {"messages": [{"role": "assistant", "content": None}, *CHAT]},
            r"f.jsonl:7: messages\[0\] is not {.role.: str",
        ),
        (
            {"messages": [*CHAT, {"role": "assistant", "tool_calls": [{"name": "a", "arguments": {}}]}, *CHAT]},
            r'messages\[1\].tool_calls\[0\] is not {"function": {"name": string, "arguments": object}}$',
        ),
        (
            {"messages": [{"role": "assistant", "content": "", "tool_calls": {}}, {"role": "x"}]},
            r"messages\[1\] is not",
        ),
        (
            {"messages": [{"role": "assistant", "content": "", "tool_calls": "a"}]},
            r"\[0\].tool_calls is a str; expected",
        ),
        (
            {"messages": [{"role": "assistant", "content": "", "function_call": {"name": "a"}}]},
            "has a function_call; ex",
        ),
        ({"messages": WITH_ANSWER}, "f.jsonl:7: the last message is the assistant's; expected a prompt that ends with"),
        ({"question": "x", "answer": "42"}, "f.jsonl:7: the answer has no '####' before its number"),
        ({"prompt": "<image> x", "images": [{"bytes": b"x"}]}, "f.jsonl:7: the field 'images' is more than text; exp"),
        (
            {"messages": [{**CHAT[0], "images": ["a.png"]}]},
            r"f.jsonl:7: messages\[0\]: the field 'images' is more than text; exp",
        ),
        ({"prompt": "x", "video": "a.mp4"}, "f.jsonl:7: the field 'video' is more than text; expected rows of text a"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image_url"}]}]},
            r"f.jsonl:7: messages\[0\].content\[1\] has the type 'image_url'; expected messages of text alone",
        ),
    ],
)
def test_a_bad_question_is_named_by_file_and_line(fields, sentence):
    with pytest.raises(ValueError, match=sentence):
        question(fields)


def test_the_three_shapes_of_an_example():
    assert example({"prompt": "1+1=", "response": "2"}).behind == [{"role": "assistant", "content": "2"}]
    got = example({"messages": WITH_ANSWER})
    assert (got.text, got.behind) == (CHAT, WITH_ANSWER[1:])
    got = example({"question": "How many?", "answer": "#### 2"}, template=False)
    assert (got.text, got.behind) == ("How many?", [{"role": "assistant", "content": "#### 2"}])


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"prompt": "x"}, "expected the keys 'prompt' and 'response', 'messages', or .*; the row has 'prompt'"),
        ({}, "f.jsonl:7: expected the keys .* the row has no keys"),
        ({"prompt": "x", "response": "y", "audios": ["a.wav"]}, "f.jsonl:7: the field 'audios' is more than text"),
        ({"prompt": "x", "response": 3}, "f.jsonl:7: response is a int; expected a string$"),
        ({"prompt": "x", "response": WITH_ANSWER[1:]}, "f.jsonl:7: response is a list; expected a string$"),
        ({"prompt": CHAT, "response": CHAT}, "f.jsonl:7: response is a list; .* of which the last is the assistant's"),
        ({"prompt": "x", "completion": "y"}, "has 'prompt', 'completion'; sft.response_key=completion takes it"),
        (
            {"messages": [*CHAT, {**WITH_ANSWER[1], "weight": 0}]},
            "f.jsonl:7: no answer is learnt; expected one without",
        ),
        (
            {"messages": WITH_ANSWER, "tools": [{"name": "a"}]},
            "f.jsonl:7: tools is no list of {.type.: .function., .fun",
        ),
        (
            {"prompt": "x", "response": "y", "tools": [{"function": {"name": "a"}}]},
            "f.jsonl:7: tools beside a prompt that",
        ),
        ({"messages": WITH_ANSWER, "tools": "a, b"}, "f.jsonl:7: tools is no list of"),
        ({"messages": CHAT}, "f.jsonl:7: expected messages of at least two turns, the last by the assistant"),
        ({"messages": WITH_ANSWER[1:]}, "expected messages of at least two turns"),
    ],
)
def test_a_bad_example_is_named_by_file_and_line(fields, sentence):
    with pytest.raises(ValueError, match=sentence):
        example(fields)


@pytest.mark.parametrize("name", ["weight", "train", "training", "loss", "step_loss_mask"])
def test_weights_of_answers_say_whether_they_are_learnt_and_other_numbers_are_refused(name):
    learnt = {True: [1, 1.0, True, "1"], False: [0, 0.0, False, "0"]}
    for wanted, values in learnt.items():
        for value in values:
            assert is_learnt({"role": "assistant", "content": "x", name: value}) is wanted, value
            assert not is_learnt({"role": "user", "content": "x", name: value})
    for value in (0.5, 2, -1, "false", "0.5"):
        weighed = [*CHAT, {**WITH_ANSWER[1], name: value}, *WITH_ANSWER]
        with pytest.raises(ValueError, match=f"^f.jsonl:7: an answer has {name}={value!r}; expected 1 or true to l"):
            example({"messages": weighed})


# files


ROWS = [{"prompt": "1+1=", "ground_truth": "2"}, {"prompt": "1+2=", "ground_truth": "3"}]


@pytest.fixture
def jsonl(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(ROWS[0]) + "\n\n" + json.dumps(ROWS[1]) + "\n")
    return path


def test_jsonl_rows_know_their_line_and_empty_lines_are_skipped(jsonl):
    rows = read_rows(str(jsonl))
    assert [row.fields for row in rows] == ROWS
    assert [row.where for row in rows] == [f"{jsonl}:1", f"{jsonl}:3"]


def test_several_files_are_read_in_order(jsonl, tmp_path):
    other = tmp_path / "b.jsonl"
    other.write_text('{"prompt": "9"}\n')
    rows = read_rows([str(other), str(jsonl)])
    assert [row.fields["prompt"] for row in rows] == ["9", "1+1=", "1+2="]


def test_parquet_and_datasets_folder_give_the_same_rows(tmp_path):
    dataset = datasets.Dataset.from_list(ROWS)
    dataset.to_parquet(tmp_path / "a.parquet")
    dataset.save_to_disk(tmp_path / "folder")
    for name in ("a.parquet", "folder"):
        rows = read_rows(str(tmp_path / name))
        assert [row.fields for row in rows] == ROWS
        assert rows[1].where == f"{tmp_path / name}:2"


def write_nested(path, num_rows, size):
    """Rows whose truth is a list of one text of `size` letters: small on the disk, and none of them a category."""
    texts = pa.DictionaryArray.from_arrays(pa.array([0] * num_rows, pa.int32()), pa.array(["x" * size]))
    lists = pa.ListArray.from_arrays(pa.array(range(num_rows + 1), pa.int32()), texts)
    truths = pa.StructArray.from_arrays([lists], names=["ground_truth"])
    table = pa.table({"prompt": [str(i) for i in range(num_rows)], "reward_model": truths})
    parquet.write_table(table, path, store_schema=False)


def test_rows_of_a_nested_parquet_file_come_in_order_whatever_the_batches(tmp_path):
    write_nested(tmp_path / "a.parquet", 600, 3)
    rows = read_rows(str(tmp_path / "a.parquet"))
    assert [row.fields["prompt"] for row in rows] == [str(i) for i in range(600)]
    assert rows[-1] == (f"{tmp_path}/a.parquet:600", {"prompt": "599", "reward_model": {"ground_truth": ["xxx"]}}, True)


@pytest.mark.full
@pytest.mark.parametrize(("num_rows", "size"), [(2300, 1 << 20), (300, 10 << 20)], ids=["many", "large"])
def test_nested_rows_of_more_than_two_gigabytes_are_read(tmp_path, num_rows, size):
    """Of the second file 256 rows are more than one batch can hold."""
    write_nested(tmp_path / "a.parquet", num_rows, size)
    numbers = [int(row.fields["prompt"]) for row in FILE_KINDS[".parquet"](tmp_path / "a.parquet")]
    assert numbers == list(range(num_rows))


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
        read_rows(str(tmp_path / name))


def test_a_missing_file_and_a_wrong_folder_are_named(tmp_path):
    with pytest.raises(ValueError, match="gone.jsonl: no such file or folder"):
        read_rows(str(tmp_path / "gone.jsonl"))
    with pytest.raises(ValueError, match="not a folder of `datasets.save_to_disk`"):
        read_rows(str(tmp_path))
    datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)}).save_to_disk(tmp_path / "both")
    with pytest.raises(ValueError, match=r"a folder of several splits; name one of them \(train\)"):
        read_rows(str(tmp_path / "both"))


def test_the_digest_follows_the_content_and_not_the_name(jsonl, tmp_path):
    copy = tmp_path / "copy.jsonl"
    copy.write_bytes(jsonl.read_bytes())
    assert content_digest(str(copy)) == content_digest([str(jsonl)])
    copy.write_bytes(jsonl.read_bytes() + b" ")
    assert content_digest(str(copy)) != content_digest(str(jsonl))
    assert content_digest(str(tmp_path)) == content_digest(str(tmp_path))


def test_a_row_of_more_bytes_than_a_row_may_have_is_named(tmp_path):
    """Before it is made: also where a parquet file holds its text once, and names it many times."""
    rows = [{"prompt": "1", "tags": ["a"]}] * 300 + [{"prompt": "2" * 1000, "tags": ["b" * 100] * 20}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "a.parquet")
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "a")
    for name in ("a.jsonl", "a.parquet", "a"):
        read = read_rows(str(tmp_path / name), 10_000)
        assert [row.fields for row in read] == rows
        assert read[-1].where.endswith(f"{name}:301")
        words = f"^{tmp_path / name}:301: the row has more than 2,000 bytes; expected .* a higher data.max_row_bytes$"
        with pytest.raises(ValueError, match=words):
            read_rows(str(tmp_path / name), 2000)


def test_maps_and_many_texts_of_a_parquet_file_are_read(tmp_path):
    """In a time that grows with the number of rows: a batch looks at the values of its own rows alone."""
    number = pa.array([3, 4, None]).dictionary_encode()
    one = pa.array([[("k", ["v"])], [], None], pa.map_(pa.string(), pa.list_(pa.string())))
    parquet.write_table(pa.table({"number": number, "map": one, "text": ["a", None, "b"]}), tmp_path / "a.parquet")
    read = [row.fields for row in read_rows(str(tmp_path / "a.parquet"))]
    assert [row["map"] for row in read] == [[("k", ["v"])], [], None]
    assert [(row["number"], row["text"]) for row in read] == [(3, "a"), (4, None), (None, "b")]
    parquet.write_table(pa.table({"text": [f"{i:>20}" for i in range(100_000)]}), tmp_path / "b.parquet")
    begin = process_time()
    assert sum(1 for _ in read_parquet(tmp_path / "b.parquet")) == 100_000
    assert process_time() - begin < 3


BOMBS = """
import resource, sys
import megarl.data.readers, pyarrow.parquet, pyarrow.compute
from megarl.data.readers import FILE_KINDS
import psutil
free = psutil.Process().memory_info().vms + int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_AS, (free, free))
try:
    megarl.data.readers.read_rows(sys.argv[1])
except ValueError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("rows", "text", "words"),
    [
        (100_000, "a" * 20_000, r"a.parquet:\d+: the rows to here take [\d,]+ bytes of memory, and [\d,]+ were free; "),
        (300, "a" * 20_000_000, r"a.parquet:1: the row has more than 16,777,216 bytes; expected a shorter one"),
    ],
)
def test_a_small_file_that_becomes_large_is_a_sentence(tmp_path, rows, text, words):
    """A dictionary with one text and a row for each time that it is named, in 400 MB of memory."""
    column = pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), pa.array([text]))
    file = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"prompt": column}), file, store_schema=False)
    assert file.stat().st_size < 2_000_000 < 400_000_000 < rows * len(text)
    read = [sys.executable, "-c", BOMBS, str(file), "400000000"]
    done = subprocess.run(read, capture_output=True, text=True, check=True, timeout=120)
    assert re.fullmatch(rf"{tmp_path}/{words}.*\n", done.stdout), done.stdout
