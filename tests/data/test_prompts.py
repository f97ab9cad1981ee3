"""Prompts and demonstrations of the rows of a file, by number of visit."""

import json

import datasets
import pytest
from chat_templates import tokenizer_of

from megarl.data.chat import encode_many
from megarl.data.examples.tiny import tiny_tokenizer
from megarl.data.order import fingerprint_of
from megarl.data.prompts import Prompts, RowSettings
from megarl.data.sft import SftExamples


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def sums(tmp_path):
    return write(
        tmp_path / "sums.jsonl",
        [{"prompt": f"{a}+1=", "ground_truth": str(a + 1), "data_source": "sums", "a": a} for a in range(8)],
    )


def test_a_prompt_carries_the_row(sums, tokenizer):
    prompts = Prompts(sums, tokenizer, RowSettings(4, shuffle=False))
    assert prompts.data_sources == {"sums"}
    prompt = prompts.visit(2)
    assert (prompt.uid, prompts.visit(8).uid, len(prompts)) == ("0-2", "1-0", 8)
    assert prompt.token_ids == tokenizer.convert_tokens_to_ids(["2", "+", "1", "="])
    assert (prompt.text, prompt.ground_truth, prompt.data_source, prompt.extra) == ("2+1=", "3", "sums", {"a": 2})


def test_a_field_that_no_checkpoint_can_hold_is_named_with_its_row(sums, tokenizer, tmp_path):
    Prompts(sums, tokenizer, RowSettings(4)).check_saveable()
    rows = datasets.Dataset.from_list([{"prompt": "1+", "level": 1, "grid": [[1, 2], [3, 4]]}] * 2)
    rows.with_format("numpy", columns=["grid"], output_all_columns=True).save_to_disk(tmp_path / "rows")
    prompts = Prompts(str(tmp_path / "rows"), tokenizer, RowSettings(4))
    words = "rows:1: a checkpoint cannot hold the field 'grid': it is or holds a ndarray; expected text, .*save_freq=-1"
    with pytest.raises(ValueError, match=words):
        prompts.check_saveable()


def test_evaluation_takes_the_first_rows_in_file_order_and_training_may_use_the_first_alone(sums, tokenizer):
    prompts = Prompts(sums, tokenizer, RowSettings(4))
    assert [prompt.uid for prompt in prompts.all(3)] == ["eval-0", "eval-1", "eval-2"]
    first = Prompts(sums, tokenizer, RowSettings(4), max_rows=3)
    assert (len(prompts.all()), len(first)) == (8, 3)
    assert sorted(first.visit(number).uid for number in range(3)) == ["0-0", "0-1", "0-2"]
    assert first.fingerprint != prompts.fingerprint


def test_the_fingerprint_belongs_to_all_that_decides_which_prompt_a_visit_is(sums, tokenizer, tmp_path):
    def found(path=sums, **how):
        return Prompts(path, tokenizer, RowSettings(4, overlong="filter", **how)).fingerprint

    changed = write(tmp_path / "b.jsonl", [{"prompt": "1"}] * 8)
    assert found() == found() == found(shuffle=True, seed=0)
    assert len({found(), found(changed), found(seed=1), found(shuffle=False)}) == 4
    assert found(shuffle=False, seed=1) == found(shuffle=False), "without shuffling the seed decides nothing"
    one, other = (fingerprint_of(sums, [row], shuffle=False, seed=0) for row in (0, 1))
    assert one != other, "as many rows, but with another system prompt or tokenizer other ones may be too long"


def test_a_long_prompt_is_refused_by_line_or_counted(tmp_path, tokenizer):
    path = write(tmp_path / "a.jsonl", [{"prompt": "12"}, {"prompt": "12345"}, {"prompt": "1"}])
    with pytest.raises(
        ValueError, match=r"a.jsonl:2: the prompt has at least 5 tokens, data.max_prompt_length is 4; use a sh"
    ):
        Prompts(path, tokenizer, RowSettings(4))
    prompts = Prompts(path, tokenizer, RowSettings(4, overlong="filter", shuffle=False))
    assert (prompts.num_filtered, len(prompts)) == (1, 2)
    assert [prompts.left_out(first) for first in (1, 2, 9, None)] == [0, 1, 1, 1]
    assert [prompts.visit(number).uid for number in range(2)] == ["0-0", "0-2"]
    with pytest.raises(ValueError, match="data.max_prompt_length=0: every prompt of .*a.jsonl is longer"):
        Prompts(path, tokenizer, RowSettings(0, overlong="filter"))
    with pytest.raises(ValueError, match="b.jsonl:1: the prompt is empty; expected at least one token"):
        Prompts(write(tmp_path / "b.jsonl", [{"prompt": ""}]), tokenizer, RowSettings(4))


def test_a_long_prompt_is_cut_where_asked_and_counted(tmp_path, tokenizer):
    path = write(tmp_path / "a.jsonl", [{"prompt": "12"}, {"prompt": "12345"}])
    for side, left in (("left", "345"), ("right", "123"), ("middle", "145")):
        prompts = Prompts(path, tokenizer, RowSettings(3, overlong=side, shuffle=False))
        assert (prompts.num_cut, prompts.num_filtered) == (1, 0)
        assert [tokenizer.decode(prompt.token_ids) for prompt in prompts.all()] == ["12", left]
        assert prompts.visit(1).text == "12345"


def test_gsm8k_rows_and_a_system_prompt_go_through_the_chat_template(tmp_path, tokenizer):
    path = write(tmp_path / "a.jsonl", [{"question": "2+2?", "answer": "It is 4. #### 4"}])
    prompt = Prompts(path, tokenizer, RowSettings(64, system_prompt="be brief")).visit(0)
    assert tokenizer.decode(prompt.token_ids) == "<system>be brief<eos><user>2+2?<eos><assistant>"
    assert prompt.text == [{"role": "user", "content": "2+2?"}]
    assert prompt.ground_truth == "4"


def test_some_rows_come_from_all_sources_in_turn_with_their_lines(tmp_path, tokenizer):
    sources = ["a", "a", "a", "b", "b", "c"]
    file = write(tmp_path / "x.jsonl", [{"prompt": f"{i}+1=", "data_source": s} for i, s in enumerate(sources)])
    prompts = Prompts(file, tokenizer, RowSettings(8))
    some = prompts.some(5)
    assert [where for where, _ in some] == [f"{file}:{line}" for line in (1, 4, 6, 2, 5)]
    assert [prompt.text for _, prompt in some][:2] == ["0+1=", "3+1="]
    assert len(prompts.some(99)) == 6


def test_prompts_have_no_id_that_the_model_does_not_have(sums, tokenizer):
    """A tokenizer may have more tokens than the model has embeddings; what no prompt holds does not matter."""
    highest = max(tokenizer.encode("0+1=7"))
    assert len(Prompts(sums, tokenizer, RowSettings(4, num_ids=highest + 1))) == 8
    with pytest.raises(
        ValueError, match=rf"sums.jsonl:\d: it holds the token '.', whose id is {highest}, and the model "
    ):
        Prompts(sums, tokenizer, RowSettings(4, num_ids=highest))


def test_calls_of_the_history_and_tools_are_rendered(tmp_path):
    call = {"id": "call00000", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    asked = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    asked.append({"role": "tool", "tool_call_id": "call00000", "name": "add", "content": "2"})
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    file, tokenizer = write(tmp_path / "a.jsonl", [{"prompt": asked, "tools": tools}]), tokenizer_of("kimi")
    (prompt,) = Prompts(file, tokenizer, RowSettings(999)).all()
    expected = tokenizer.apply_chat_template(asked, tools=tools, add_generation_prompt=True, tokenize=False)
    assert tokenizer.decode(prompt.token_ids) == expected
    assert (prompt.text, prompt.extra) == (asked, {"tools": tools})
    write(tmp_path / "b.jsonl", [{"prompt": asked[:1], "tools": tools}, {"prompt": asked[:1]}])
    with pytest.raises(ValueError, match=r"b.jsonl:1: the chat template leaves out the tools; expected"):
        Prompts(str(tmp_path / "b.jsonl"), tokenizer_of("chatml"), RowSettings(999))


@pytest.mark.parametrize("tools", ["python", {"calc": {}}, ["python"], [{"name": "add"}], [3], "[1"])
def test_tools_that_are_no_functions_stay_a_field_for_the_reward_and_are_said(tools, tmp_path):
    rows = [{"prompt": [{"role": "user", "content": "1+1"}], "tools": tools}, {"prompt": "1+1", "tools": tools}]
    prompts = Prompts(write(tmp_path / "a.jsonl", rows), tokenizer_of("qwen2_5"), RowSettings(999))
    assert [prompt.extra for prompt in prompts.all()] == [{"tools": tools}] * 2
    assert prompts.tools_said.startswith("2 rows have a field tools that the reward gets, and the prompt not")


def test_tools_in_the_form_of_hermes_are_functions_in_the_prompt(tmp_path):
    function = {"name": "add", "parameters": {"type": "object"}}
    told = []
    for tool in (function, {"type": "function", "function": function}):
        rows = [{"prompt": [{"role": "user", "content": "1+1"}], "tools": [tool]}]
        prompts = Prompts(write(tmp_path / "a.jsonl", rows), tokenizer_of("qwen2_5"), RowSettings(999))
        told.append((prompts.all()[0].token_ids, prompts.tools_said))
    assert told[0] == told[1] and told[0][1] == ""


# demonstrations
def test_the_loss_covers_the_response_and_its_end(tmp_path, tokenizer):
    path = write(tmp_path / "a.jsonl", [{"prompt": "12+34=", "response": "46"}, {"prompt": "1=", "response": "1"}])
    batch = SftExamples(path, tokenizer, RowSettings(9, shuffle=False)).take(2)
    assert batch.lengths.tolist() == [9, 4]
    assert tokenizer.decode(batch.tokens.tolist()) == "12+34=46<eos>1=1<eos>"
    assert batch.columns["response_mask"].tolist() == [0, 0, 0, 0, 0, 0, 1, 1, 1, 0, 0, 1, 1]


def test_chat_examples_use_the_template_for_the_prompt_only(tmp_path, tokenizer):
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    batch = SftExamples(write(tmp_path / "a.jsonl", [{"messages": turns}]), tokenizer, RowSettings(64)).take(1)
    assert tokenizer.decode(batch.tokens.tolist()) == "<user>hi<eos><assistant>yo<eos>"
    assert batch.columns["response_mask"].tolist() == [0] * 5 + [1] * 3


def test_position_and_epochs(tmp_path, tokenizer):
    path = write(tmp_path / "a.jsonl", [{"prompt": f"{i}=", "response": f"{i}"} for i in range(7)])
    examples = SftExamples(path, tokenizer, RowSettings(9, seed=2))
    assert len(examples) == 7
    assert sorted(examples.take(7).tokens[::4].tolist()) == sorted(tokenizer.convert_tokens_to_ids(list("0123456")))
    examples.take(2)
    again = SftExamples(path, tokenizer, RowSettings(9, seed=2))
    again.load_state_dict(examples.state_dict())
    assert again.take(9).tokens.tolist() == examples.take(9).tokens.tolist()


def test_long_and_empty_examples(tmp_path, tokenizer):
    path = write(tmp_path / "a.jsonl", [{"prompt": "12+34=", "response": "46"}, {"prompt": "1", "response": "1"}])
    with pytest.raises(ValueError, match="a.jsonl:1: prompt and response have 9 tokens, sft.max_length is 8; use a s"):
        SftExamples(path, tokenizer, RowSettings(8))
    assert SftExamples(path, tokenizer, RowSettings(8, overlong="filter")).num_filtered == 1
    with pytest.raises(ValueError, match="sft.max_length=2: every example of .*a.jsonl is longer"):
        SftExamples(path, tokenizer, RowSettings(2, overlong="filter"))
    empty = write(tmp_path / "b.jsonl", [{"prompt": "", "response": "1"}])
    with pytest.raises(ValueError, match="b.jsonl:1: the prompt is empty"):
        SftExamples(empty, tokenizer, RowSettings(8))


def test_batches_have_each_example_once_in_the_order_of_the_file(tmp_path, tokenizer):
    path = write(tmp_path / "a.jsonl", [{"prompt": f"{i}=", "response": f"{i}"} for i in range(5)])
    examples = SftExamples(path, tokenizer, RowSettings(9, seed=2))
    batches = list(examples.batches(2))
    assert [batch.num_sequences for batch in batches] == [2, 2, 1]
    assert [tokenizer.decode(batch.tokens.tolist())[:1] for batch in batches] == ["0", "2", "4"]
    assert examples.state_dict()["next"] == 0, "the training goes on where it was"


def test_of_a_text_that_is_too_long_only_the_front_is_tokenised(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["1" * 1000])  # a text may have few tokens although it is long
    texts = ["12" * 50_000, "1" * 3000, "12"]
    lengths = [len(ids) for ids in encode_many(tokenizer, texts, enough=4)]
    assert 4 < lengths[0] < 2000 and lengths[1:] == [3, 2]
    path = write(tmp_path / "a.jsonl", [{"prompt": text} for text in texts])
    with pytest.raises(ValueError, match=r"a.jsonl:1: the prompt has at least \d{2,4} tokens, data.max_prompt_length"):
        Prompts(path, tokenizer, RowSettings(4))
    kept = Prompts(path, tokenizer, RowSettings(4, overlong="filter"))
    assert (len(kept), kept.num_filtered, kept.longest) == (2, 1, 3)
    assert Prompts(path, tokenizer, RowSettings(4, overlong="right")).all()[0].token_ids == [
        *tokenizer.encode("12"), *tokenizer.encode("12")
    ]  # fmt: skip
