import pytest

from megarl.data.fields import example_of, gsm8k_answer, question_of
from megarl.data.readers import Record

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


def test_a_string_prompt_with_everything_else_in_extra():
    got = question({"prompt": "1+1=", "ground_truth": "2", "data_source": "sums", "level": 3})
    assert (got.text, got.ground_truth, got.data_source, got.extra) == ("1+1=", "2", "sums", {"level": 3})


def test_the_keys_can_be_renamed_and_a_number_is_a_ground_truth():
    got = question({"q": "1+1=", "a": 2, "prompt": "kept"}, prompt_key="q", ground_truth_key="a")
    assert (got.text, got.ground_truth, got.extra) == ("1+1=", "2", {"prompt": "kept"})


def test_messages_under_either_name():
    assert question({"prompt": CHAT}).text == CHAT
    assert question({"messages": CHAT}).text == CHAT
    assert question({"messages": CHAT}).ground_truth is None


def test_gsm8k_rows_become_a_user_message_where_there_is_a_template():
    fields = {"question": "How many?", "answer": "So 1,000 + 5.\n#### 1,005"}
    assert question(fields).text == [{"role": "user", "content": "How many?"}]
    assert question(fields, template=False).text == "How many?"
    assert question(fields).ground_truth == "1005"
    assert question(fields).extra == {"answer": fields["answer"]}


def test_the_ground_truth_of_verl_rows():
    fields = {"prompt": CHAT, "reward_model": {"style": "rule", "ground_truth": "42"}, "extra_info": {"index": 1}}
    got = question(fields)
    assert got.ground_truth == "42"
    assert got.extra == {"reward_model": fields["reward_model"], "extra_info": {"index": 1}}


def test_gsm8k_answer_by_hand():
    assert gsm8k_answer("a #### b #### 2,048 ") == "2048"
    assert gsm8k_answer("no mark") is None


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (
            {"text": "x"},
            "f.jsonl:7: no prompt; expected the key 'prompt', 'messages' or 'question', the row has 'text'",
        ),
        ({"prompt": 3}, "f.jsonl:7: prompt is a int; expected a string or a list of chat messages"),
        ({"prompt": []}, "f.jsonl:7: prompt is a list; expected a string or a list of chat messages"),
        ({"messages": [{"role": "user"}]}, r'f.jsonl:7: messages\[0\] is not {"role": string, "content": string}'),
        ({"messages": [*CHAT, "x"]}, r'f.jsonl:7: messages\[1\] is not {"role": string'),
        ({"messages": WITH_ANSWER}, "f.jsonl:7: the last message is the assistant's; expected a prompt that ends with"),
        ({"prompt": "x", "ground_truth": [1]}, "f.jsonl:7: ground_truth is a list; expected a string or a number"),
        ({"prompt": "x", "ground_truth": True}, "f.jsonl:7: ground_truth is a bool; expected a string or a number"),
        ({"question": "x", "answer": "42"}, "f.jsonl:7: the answer has no '####' before its number"),
        (
            {"prompt": "<image> x", "images": [{"bytes": b"x"}]},
            "f.jsonl:7: the field 'images' is more than text; expect",
        ),
        (
            {"prompt": "x", "video": "a.mp4"},
            "f.jsonl:7: the field 'video' is more than text; expected rows of text alo",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image_url"}]}]},
            r"f.jsonl:7: messages\[0\].content\[1\] has the type 'image_url'; expected messages of text alone",
        ),
    ],
)
def test_a_bad_question_is_named_by_file_and_line(fields, sentence):
    with pytest.raises(ValueError, match=sentence):
        question(fields)


def test_a_column_for_images_may_be_empty():
    """A parquet file of mixed rows has the column in each of them."""
    assert question({"prompt": "x", "images": None, "videos": []}).text == "x"


def test_the_three_shapes_of_an_example():
    assert (example({"prompt": "1+1=", "response": "2"}).response) == "2"
    got = example({"messages": WITH_ANSWER})
    assert (got.text, got.response) == (CHAT, "hello")
    got = example({"question": "How many?", "answer": "#### 2"}, template=False)
    assert (got.text, got.response) == ("How many?", "#### 2")


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"prompt": "x"}, "expected the keys 'prompt' and 'response', 'messages', or .*; the row has 'prompt'"),
        ({}, "f.jsonl:7: expected the keys .* the row has no keys"),
        ({"prompt": "x", "response": "y", "audios": ["a.wav"]}, "f.jsonl:7: the field 'audios' is more than text"),
        ({"prompt": "x", "response": 3}, "f.jsonl:7: response is a int; expected a string"),
        ({"messages": CHAT}, "f.jsonl:7: expected messages of at least two turns, the last by the assistant"),
        ({"messages": WITH_ANSWER[1:]}, "expected messages of at least two turns"),
    ],
)
def test_a_bad_example_is_named_by_file_and_line(fields, sentence):
    with pytest.raises(ValueError, match=sentence):
        example(fields)
