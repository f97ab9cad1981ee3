import json

import pytest

from megarl.data.examples.tiny import tiny_tokenizer
from megarl.data.sft import SftExamples


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_the_loss_covers_the_response_and_its_end(tmp_path, tokenizer):
    path = write(tmp_path / "a.jsonl", [{"prompt": "12+34=", "response": "46"}, {"prompt": "1=", "response": "1"}])
    batch = SftExamples(path, tokenizer, max_length=9, shuffle=False).take(2)
    assert batch.lengths.tolist() == [9, 4]
    assert tokenizer.decode(batch.tokens.tolist()) == "12+34=46<eos>1=1<eos>"
    assert batch.columns["response_mask"].tolist() == [0, 0, 0, 0, 0, 0, 1, 1, 1, 0, 0, 1, 1]


def test_chat_examples_use_the_template_for_the_prompt_only(tmp_path, tokenizer):
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    batch = SftExamples(write(tmp_path / "a.jsonl", [{"messages": turns}]), tokenizer, max_length=64).take(1)
    assert tokenizer.decode(batch.tokens.tolist()) == "<user>hi<eos><assistant>yo<eos>"
    assert batch.columns["response_mask"].tolist() == [0] * 5 + [1] * 3


def test_position_and_epochs(tmp_path, tokenizer):
    path = write(tmp_path / "a.jsonl", [{"prompt": f"{i}=", "response": f"{i}"} for i in range(7)])
    examples = SftExamples(path, tokenizer, max_length=9, seed=2)
    assert len(examples) == 7
    assert sorted(examples.take(7).tokens[::4].tolist()) == sorted(tokenizer.convert_tokens_to_ids(list("0123456")))
    examples.take(2)
    again = SftExamples(path, tokenizer, max_length=9, seed=2)
    again.load_state_dict(examples.state_dict())
    assert again.take(9).tokens.tolist() == examples.take(9).tokens.tolist()


def test_long_and_empty_examples(tmp_path, tokenizer):
    path = write(tmp_path / "a.jsonl", [{"prompt": "12+34=", "response": "46"}, {"prompt": "1", "response": "1"}])
    with pytest.raises(ValueError, match="a.jsonl:1: prompt and response have 9 tokens, sft.max_length is 8; use a s"):
        SftExamples(path, tokenizer, max_length=8)
    assert SftExamples(path, tokenizer, max_length=8, overlong="filter").num_filtered == 1
    with pytest.raises(ValueError, match="sft.max_length=2: every example of .*a.jsonl is longer"):
        SftExamples(path, tokenizer, max_length=2, overlong="filter")
    empty = write(tmp_path / "b.jsonl", [{"prompt": "", "response": "1"}])
    with pytest.raises(ValueError, match="b.jsonl:1: the prompt is empty"):
        SftExamples(empty, tokenizer, max_length=8)


def test_batches_have_each_example_once_in_the_order_of_the_file(tmp_path, tokenizer):
    path = write(tmp_path / "a.jsonl", [{"prompt": f"{i}=", "response": f"{i}"} for i in range(5)])
    examples = SftExamples(path, tokenizer, max_length=9, seed=2)
    batches = list(examples.batches(2))
    assert [batch.num_sequences for batch in batches] == [2, 2, 1]
    assert [tokenizer.decode(batch.tokens.tolist())[:1] for batch in batches] == ["0", "2", "4"]
    assert examples.state_dict()["next"] == 0, "the training goes on where it was"
