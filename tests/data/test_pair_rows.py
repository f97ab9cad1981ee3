"""Rows of pairs: their forms, what is learnt of them, what is refused, and what a reward model reads."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_templates import tokenizer_of
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from megarl.data.examples.tiny import tiny_tokenizer
from megarl.data.pairs import PairExamples, to_be_scored
from megarl.data.prompts import RowSettings
from megarl.rewards.services.judge import RewardModel
from megarl.rewards.services.limit import Limit
from megarl.samples.batch import SIGN
from megarl.samples.sample import Completion, Prompt, VersionSpan

ASKED = [{"role": "user", "content": "2+3="}]
ANSWERED = [*ASKED, {"role": "assistant", "content": "5"}]
SYSTEM = {"role": "system", "content": "Be kind."}
WRONG = {"role": "assistant", "content": "66"}
TEXTS = {"prompt": "2+3=", "chosen": "5", "rejected": "66"}
FORMS = {
    "conversations": {
        "chosen": [*ASKED, {"role": "assistant", "content": "5"}],
        "rejected": [*ASKED, {"role": "assistant", "content": "66"}],
    },
    "conversations behind their prompt": {"prompt": "2+3= ", "chosen": ANSWERED, "rejected": [*ASKED, WRONG]},
    "conversations behind their messages": {"prompt": ASKED, "chosen": ANSWERED, "rejected": [*ASKED, WRONG]},
    "messages": {
        "prompt": ASKED,
        "chosen": [{"role": "assistant", "content": "5"}],
        "rejected": [{"role": "assistant", "content": "66"}],
    },
    "messages and texts": {"prompt": ASKED, "chosen": "5", "rejected": "66"},
    "turns in texts": {
        "chosen": "\n\nHuman: 2+3=\n\nAssistant: 5",
        "rejected": "\n\nHuman: 2+3=\n\nAssistant: 66",
    },
}


def read(folder: Path, *rows: dict[str, Any], limit: int = 40, tokenizer: Any = None, **more: Any) -> PairExamples:
    file = folder / "pairs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    overlong, to_its_end = more.pop("overlong", "error"), more.pop("to_its_end", False)
    settings = RowSettings(limit, shuffle=False, overlong=overlong, **more)
    return PairExamples([str(file)], tokenizer or tiny_tokenizer(), settings, to_its_end=to_its_end)


def texts_of(examples: PairExamples, tokenizer: PreTrainedTokenizerBase) -> list[tuple[str, str]]:
    """Of each row its text, and what of it is learnt."""
    (batch,) = examples.batches(99)
    mask = batch.columns["response_mask"] != 0
    lengths = batch.lengths.tolist()
    parts = zip(batch.tokens.split(lengths), mask.split(lengths), strict=True)
    return [(tokenizer.decode(tokens), tokenizer.decode(tokens[own])) for tokens, own in parts]


def test_texts_are_a_prompt_and_two_answers_with_their_ends(tmp_path: Path) -> None:
    examples = read(tmp_path, TEXTS, TEXTS | {"margin": 1.5})
    assert texts_of(examples, tiny_tokenizer())[:2] == [("2+3=5<eos>", "5<eos>"), ("2+3=66<eos>", "66<eos>")]
    batch = examples.take(2)
    assert batch.rows.tolist() == [2, 2] and batch.lengths.tolist() == [6, 7] * 2
    assert batch.columns[SIGN].tolist() == ([1.0] * 6 + [-1.0] * 7) * 2
    assert batch.per_sequence["margin"].tolist() == [0.0, 1.5] and not batch.columns["ref_log_probs"].any()
    assert examples.said == "2 rows are 2 pairs, 4 sequences with 10 learnt tokens"
    assert examples.longest(1) == (f"{tmp_path}/pairs.jsonl:1", 15)


@pytest.mark.parametrize("form", sorted(FORMS))
def test_chat_forms_are_the_same_pair(tmp_path: Path, form: str) -> None:
    found = texts_of(read(tmp_path, FORMS[form]), tiny_tokenizer())
    asked = "<user>2+3=<eos><assistant>"
    assert found == [(f"{asked}5<eos>", "5<eos>"), (f"{asked}66<eos>", "66<eos>")]


@pytest.mark.parametrize("as_chat", [False, True])
def test_texts_with_turns_are_split_behind_the_last_assistant_before_they_part(tmp_path: Path, as_chat: bool) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = tokenizer.chat_template if as_chat else None
    before = "\n\nHuman: 1+1=\n\nAssistant: 2\n\nHuman: 2+3=\n\nAssistant:"
    ends = (f"{before} 5\n\nHuman: 5+1=\n\nAssistant: 6", f"{before} 55")
    examples = read(tmp_path, dict(zip(("chosen", "rejected"), ends, strict=True)), tokenizer=tokenizer, limit=200)
    found = texts_of(examples, tokenizer)
    if as_chat:
        asked = "<user>1+1=<eos><assistant>2<eos><user>2+3=<eos><assistant>"
        assert found[0] == (f"{asked}5<eos><user>5+1=<eos><assistant>6<eos>", "5<eos>6<eos>")
        assert found[1] == (f"{asked}55<eos>", "55<eos>")
    else:
        batch = examples.take(1)
        ids = [row.tolist() for row in batch.tokens.split(batch.lengths.tolist())]
        wanted = [[tokenizer(part)["input_ids"] for part in (before, text.removeprefix(before))] for text in ends]
        assert ids == [prompt + answer + [tokenizer.eos_token_id] for prompt, answer in wanted]
    form = "chat messages" if as_chat else "a prompt and two answers"
    assert examples.said.endswith(f"1 rows are texts with turns of Human and Assistant, read as {form}")


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "2+3=", "chosen": "5"}, "expected 'prompt', 'chosen' and 'rejected', or two conversations"),
        (TEXTS | {"rejected": None, "messages": ANSWERED}, "expected 'prompt', 'chosen' and 'rejected'"),
        ({"chosen": "2+3=5", "rejected": "2+3=6"}, "expected 'prompt', 'chosen' and 'rejected', or two conversations"),
        ({"chosen": "\n\nHuman: a", "rejected": "\n\nHuman: b"}, r"have no '\n\nAssistant:' before they part"),
        ({"chosen": ASKED, "rejected": [{"role": "user", "content": "no"}]}, "share 0 messages; expected two answers"),
        ({"chosen": ASKED, "rejected": ANSWERED}, "share 1 messages; expected two answers to the same prompt"),
        ({"chosen": [SYSTEM, *ANSWERED], "rejected": [SYSTEM, ASKED[0] | {"content": "1+1="}, ANSWERED[1]]}, "share 1"),
        (TEXTS | {"chosen": ANSWERED}, "one of chosen and rejected is a conversation; expected both, or none"),
        (FORMS["conversations"] | {"prompt": "1+1="}, "prompt is not what chosen and rejected begin with"),
        (TEXTS | {"margin": 10**400}, "expected a finite number of float32"),
        (TEXTS | {"margin": 1e39}, "margin is 1e+39; expected a finite number of float32"),
        (TEXTS | {"margin": "much"}, "margin is 'much'; expected a finite number"),
    ],
)
def test_a_row_that_is_no_pair_is_refused_with_its_line(tmp_path: Path, row: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match="pairs.jsonl:1: ") as caught:
        read(tmp_path, row)
    assert said in str(caught.value)


def test_a_pair_of_which_one_answer_is_too_long_is_left_out_whole(tmp_path: Path) -> None:
    long = TEXTS | {"rejected": "6" * 30}
    examples = read(tmp_path, long, TEXTS, limit=12, overlong="filter")
    assert len(examples) == 1 and texts_of(examples, tiny_tokenizer())[0] == ("2+3=5<eos>", "5<eos>")
    with pytest.raises(ValueError, match="every example of"):
        read(tmp_path, long, limit=12, overlong="filter")


def test_pairs_of_equal_answers_are_left_out_and_counted(tmp_path: Path) -> None:
    same = {"chosen": ANSWERED, "rejected": ANSWERED}
    cut = TEXTS | {"chosen": "1" * 30, "rejected": "1" * 30 + "2"}
    examples = read(tmp_path, TEXTS | {"rejected": "5"}, same, TEXTS, cut, limit=12, overlong="right")
    assert len(examples) == 1 and "3 have two equal answers and are left out" in examples.said


def test_the_log_probs_of_the_start_are_asked_for_once_of_each_pair_that_is_used(tmp_path: Path) -> None:
    examples = read(tmp_path, *(TEXTS | {"chosen": str(number)} for number in range(5)))
    asked = list[str]()

    def log_probs(batch: Any) -> torch.Tensor:
        asked.extend(tiny_tokenizer().decode(batch.tokens).split("2+3=")[1::2])
        return -batch.tokens.float()

    told = list[tuple[int, int]]()
    examples.fill_references(3, 2, log_probs, lambda *done: told.append(done))
    assert asked == ["0<eos>", "1<eos>", "2<eos>"] and told == [(0, 2), (1, 2)]
    examples.fill_references(7, 2, log_probs)  # around the end of the epoch
    assert asked[3:] == ["2<eos>", "3<eos>", "4<eos>"], "whole requests, as a run that resumes makes them"
    batch = examples.take(6)
    assert torch.equal(batch.columns["ref_log_probs"], -batch.tokens.float())


def test_scores_stand_behind_each_answer_and_nothing_else_counts(tmp_path: Path) -> None:
    batch = to_be_scored(read(tmp_path, TEXTS | {"margin": 2.0}, TEXTS, to_its_end=True, limit=60).take(2))
    ends = (batch.lengths.cumsum(0) - 1).tolist()
    assert batch.columns["response_mask"].nonzero().squeeze(1).tolist() == ends
    assert batch.columns[SIGN][ends].tolist() == [1.0, -1.0, 1.0, -1.0]
    assert batch.segment_ids[ends].tolist() == [0, 0, 1, 1]
    assert [float(part.sum()) for part in batch.split(batch.columns["margin"])] == [2.0, 0.0]
    texts = [tiny_tokenizer().decode(row[:-1]) for row in batch.tokens.split(batch.lengths.tolist())]
    assert texts[:2] == ["<user>2+3=<eos><assistant>5<eos>", "<user>2+3=<eos><assistant>66<eos>"]


@pytest.mark.parametrize(
    ("template", "prompt"),
    [
        pytest.param(template, prompt, id=f"{template} {type(prompt).__name__}")
        for template in ("chatml", "llama3", "mistral", None)
        for prompt in ("2+3= hel", *([ASKED] if template else []))
    ],
)
def test_a_reward_model_is_trained_on_what_its_server_will_read(
    tmp_path: Path, template: str | None, prompt: Any
) -> None:
    """Some templates write more behind the token that ends an answer; texts may join in the middle of a word."""
    tokenizer_of(template or "chatml").save_pretrained(tmp_path / "model")
    if template is None:
        (tmp_path / "model" / "chat_template.jinja").unlink()
    loaded = AutoTokenizer.from_pretrained(tmp_path / "model")
    row = {"prompt": prompt, "chosen": "lo 5", "rejected": "66"}
    says = None if template in (None, "mistral") else "Be kind."
    batch = read(tmp_path, row, tokenizer=loaded, to_its_end=True, limit=400, system_prompt=says).take(1)
    reward = RewardModel(str(tmp_path / "model"), "http://h", limit=Limit(), system_prompt=says)
    for rows, answer in zip(batch.tokens.split(batch.lengths.tolist()), ("lo 5", "66"), strict=True):
        completion = Completion([1], [0.0], "stop", (VersionSpan(0, 0, 1),), answer)
        assert rows.tolist() == reward.token_ids(Prompt("0-0", [1], prompt), completion)
