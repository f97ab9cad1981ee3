import json

import datasets
import pytest

from megarl.data.examples.tiny import tiny_tokenizer
from megarl.data.order import fingerprint_of
from megarl.data.prompts import Prompts


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
    prompts = Prompts(sums, tokenizer, max_prompt_length=4, shuffle=False)
    assert prompts.data_sources == {"sums"}
    prompt = prompts.visit(2)
    assert prompt.uid == "0-2"
    assert prompt.token_ids == tokenizer.convert_tokens_to_ids(["2", "+", "1", "="])
    assert (prompt.text, prompt.ground_truth, prompt.data_source, prompt.extra) == ("2+1=", "3", "sums", {"a": 2})


def test_a_field_that_no_checkpoint_can_hold_is_named_with_its_row(sums, tokenizer, tmp_path):
    Prompts(sums, tokenizer, max_prompt_length=4).check_saveable()
    rows = datasets.Dataset.from_list([{"prompt": "1+", "level": 1, "grid": [[1, 2], [3, 4]]}] * 2)
    rows.with_format("numpy", columns=["grid"], output_all_columns=True).save_to_disk(tmp_path / "rows")
    prompts = Prompts(str(tmp_path / "rows"), tokenizer, max_prompt_length=4)
    with pytest.raises(ValueError) as error:
        prompts.check_saveable()
    assert str(error.value) == (
        f"{tmp_path / 'rows'}:1: a checkpoint cannot hold the field 'grid': it is or holds a ndarray; expected text, "
        "numbers, bytes, times, or lists and objects of these; without the field, or with trainer.save_freq=-1, the "
        "run can start"
    )


def test_an_epoch_is_a_permutation_and_the_uid_says_which(sums, tokenizer):
    prompts = Prompts(sums, tokenizer, max_prompt_length=4, seed=3)
    uids = [prompts.visit(number).uid for number in range(16)]
    assert sorted(uids[:8]) == [f"0-{row}" for row in range(8)]
    assert sorted(uids[8:]) == [f"1-{row}" for row in range(8)]
    assert [uid[2:] for uid in uids[:8]] != [uid[2:] for uid in uids[8:]]
    assert len(prompts) == 8


def test_evaluation_takes_the_first_rows_in_file_order(sums, tokenizer):
    prompts = Prompts(sums, tokenizer, max_prompt_length=4)
    assert [prompt.uid for prompt in prompts.all(3)] == ["eval-0", "eval-1", "eval-2"]
    assert len(prompts.all()) == 8


def test_training_may_use_the_first_rows_alone_which_its_fingerprint_tells(sums, tokenizer):
    first = Prompts(sums, tokenizer, max_prompt_length=4, max_rows=3)
    assert sorted(first.visit(number).uid for number in range(3)) == ["0-0", "0-1", "0-2"]
    assert len(first) == 3
    assert first.fingerprint != Prompts(sums, tokenizer, max_prompt_length=4).fingerprint


def test_the_fingerprint_belongs_to_all_that_decides_which_prompt_a_visit_is(sums, tokenizer, tmp_path):
    def found(path=sums, **how):
        return Prompts(path, tokenizer, **{"max_prompt_length": 4, "overlong": "filter", **how}).fingerprint

    changed = write(tmp_path / "b.jsonl", [{"prompt": "1"}] * 8)
    assert found() == found() == found(shuffle=True, seed=0)
    assert len({found(), found(changed), found(seed=1), found(shuffle=False)}) == 4
    assert found(shuffle=False, seed=1) == found(shuffle=False), "without shuffling the seed decides nothing"


def test_other_rows_of_the_same_files_have_another_fingerprint(tokenizer, tmp_path):
    """As many rows as before, but with a system prompt or another tokenizer other ones may be too long."""
    file = write(tmp_path / "a.jsonl", [{"prompt": "1"}] * 2)
    assert fingerprint_of(file, [0], shuffle=False, seed=0) != fingerprint_of(file, [1], shuffle=False, seed=0)


def test_a_long_prompt_is_refused_by_line_or_counted(tmp_path, tokenizer):
    path = write(tmp_path / "a.jsonl", [{"prompt": "12"}, {"prompt": "12345"}, {"prompt": "1"}])
    with pytest.raises(ValueError, match=r"a.jsonl:2: the prompt has 5 tokens, data.max_prompt_length is 4; use a sh"):
        Prompts(path, tokenizer, max_prompt_length=4)
    prompts = Prompts(path, tokenizer, max_prompt_length=4, overlong="filter", shuffle=False)
    assert (prompts.num_filtered, len(prompts)) == (1, 2)
    assert [prompts.visit(number).uid for number in range(2)] == ["0-0", "0-2"]
    with pytest.raises(ValueError, match="data.max_prompt_length=0: every prompt of .*a.jsonl is longer"):
        Prompts(path, tokenizer, max_prompt_length=0, overlong="filter")


def test_a_long_prompt_is_cut_where_asked_and_counted(tmp_path, tokenizer):
    path = write(tmp_path / "a.jsonl", [{"prompt": "12"}, {"prompt": "12345"}])
    for side, left in (("left", "345"), ("right", "123"), ("middle", "145")):
        prompts = Prompts(path, tokenizer, max_prompt_length=3, overlong=side, shuffle=False)
        assert (prompts.num_cut, prompts.num_filtered) == (1, 0)
        assert [tokenizer.decode(prompt.token_ids) for prompt in prompts.all()] == ["12", left]
        assert prompts.visit(1).text == "12345"


def test_an_empty_prompt_is_refused(tmp_path, tokenizer):
    path = write(tmp_path / "a.jsonl", [{"prompt": ""}])
    with pytest.raises(ValueError, match="a.jsonl:1: the prompt is empty; expected at least one token"):
        Prompts(path, tokenizer, max_prompt_length=4)


def test_gsm8k_rows_and_a_system_prompt_go_through_the_chat_template(tmp_path, tokenizer):
    path = write(tmp_path / "a.jsonl", [{"question": "2+2?", "answer": "It is 4. #### 4"}])
    prompt = Prompts(path, tokenizer, max_prompt_length=64, system_prompt="be brief").visit(0)
    assert tokenizer.decode(prompt.token_ids) == "<system>be brief<eos><user>2+2?<eos><assistant>"
    assert prompt.text == [{"role": "user", "content": "2+2?"}]
    assert prompt.ground_truth == "4"


def test_some_rows_come_from_all_sources_in_turn_with_their_lines(tmp_path, tokenizer):
    sources = ["a", "a", "a", "b", "b", "c"]
    file = write(tmp_path / "x.jsonl", [{"prompt": f"{i}+1=", "data_source": s} for i, s in enumerate(sources)])
    prompts = Prompts(file, tokenizer, max_prompt_length=8)
    some = prompts.some(5)
    assert [where for where, _ in some] == [f"{file}:{line}" for line in (1, 4, 6, 2, 5)]
    assert [prompt.text for _, prompt in some][:2] == ["0+1=", "3+1="]
    assert len(prompts.some(99)) == 6
