"""What is learnt of a conversation is what its chat template writes for the answers, in fifteen styles of templates."""

import json

import pytest
from chat_templates import STYLES, byte_tokenizer, source, template_of, tokenizer_of
from tokenizers import AddedToken

from megarl.data.examples.tiny import tiny_tokenizer
from megarl.data.fields import Example
from megarl.data.prompts import RowSettings
from megarl.data.sft import SftExamples
from megarl.data.sft_spans import Answers
from megarl.data.template import ChatTemplate

TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}]
CALL = {"id": "call00000", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
ASKED, AGAIN = {"role": "user", "content": "What is 12 + 3?"}, {"role": "user", "content": "And then?"}
FIRST, SECOND = {"role": "assistant", "content": "it is 15"}, {"role": "assistant", "content": "ünd 16"}
CALLS = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "call00000", "name": "add", "content": "15"}

# What a template writes for an answer `%s`, the token that ends its turn included; the header stands in the prompt.
WRITTEN = {
    "chatml": "%s<|im_end|>",
    "qwen2_5": "%s<|im_end|>",
    "qwen3": "<think>\n\n</think>\n\n%s<|im_end|>",
    "qwen3_thinking": "\n</think>\n\n%s<|im_end|>",  # the header opens the reasoning
    "llama3": "%s<|eot_id|>",
    "llama2": " %s </s>",
    "mistral": " %s</s>",
    "deepseek_v3": "%s<|end_of_sentence|>",
    "deepseek_r1": "%s<|end_of_sentence|>",
    "glm4": "\n<think></think>\n%s<|user|>",  # it stops where the next message begins
    "gpt_oss": "<|channel|>final<|message|>%s<|return|>",
    "gemma": "%s<end_of_turn>",
    "phi": "%s<|end|>",
    "command_r": "%s<|END_OF_TURN_TOKEN|>",
    "kimi": "%s<|im_end|>",
}
# The same for one call without text; None: the template writes no tools, or no calls.
WRITTEN_CALL = {
    "qwen2_5": '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>',
    "qwen3": '<think>\n\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>',
    "qwen3_thinking": '\n</think>\n\n\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>',
    "llama3": '{"name": "add", "parameters": {"a": 1}}<|eot_id|>',
    "mistral": '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}, "id": "call00000"}]</s>',
    "glm4": "\n<think></think>\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"
    "<|observation|>",
    "gpt_oss": ' to=functions.add<|channel|>commentary json<|message|>{"a": 1}<|call|>',
    "command_r": 'Action: ```json\n[{"tool_name": "add", "parameters": {"a": 1}}]```<|END_OF_TURN_TOKEN|>',
    "kimi": '<|tool_calls_section_begin|><|tool_call_begin|>call00000<|tool_call_argument_begin|>{"a": 1}'
    "<|tool_call_end|><|tool_calls_section_end|><|im_end|>",
}
# Templates that write earlier answers otherwise than the last one: each answer is a sequence of its own.
REWRITES = {"qwen3", "qwen3_thinking", "gpt_oss"}
OPENS = {"qwen3_thinking", "deepseek_r1"}  # the header of an answer opens its reasoning
WITH_REASONING = {
    "qwen3": "<think>\nso\n</think>\n\nit is 15<|im_end|>",
    "qwen3_thinking": "so\n</think>\n\nit is 15<|im_end|>",
    "deepseek_r1": "so\n</think>\n\nit is 15<|end_of_sentence|>",
    "glm4": "\n<think>so</think>\nit is 15<|user|>",
    "gpt_oss": "<|channel|>analysis<|message|>so<|end|><|start|>assistant<|channel|>final<|message|>it is 15<|return|>",
}


def examples_of(name, folder, *rows, answers="all", stop_ids=None, **settings):
    file, tokenizer = folder / "rows.jsonl", tokenizer_of(name)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    stops = tokenizer.convert_tokens_to_ids(list(STYLES[name].stops)) if stop_ids is None else stop_ids
    read = RowSettings(**{"max_length": 999, "shuffle": False} | settings)
    return SftExamples(str(file), tokenizer, read, answers=answers, stop_ids=stops)


def spans(name, examples):
    """Of each sequence its texts in turn: not learnt, learnt, not learnt, ..."""
    found = []
    for batch in examples.batches(1):
        texts, last = [], 1.0
        for token, mask in zip(batch.tokens.tolist(), batch.columns["response_mask"].tolist(), strict=True):
            if mask != last:
                texts.append([])
            texts[-1].append(token)
            last = mask
        found.append([str(tokenizer_of(name).decode(ids)) for ids in texts])
    return found


def rendered(name, messages, tools=None):
    """With the header of the next answer, by transformers."""
    return tokenizer_of(name).apply_chat_template(messages, tools=tools, add_generation_prompt=True, tokenize=False)


@pytest.mark.parametrize("name", STYLES)
def test_sft_spans_are_all_answers_as_the_template_writes_them_behind_the_prompt_that_asks(name, tmp_path):
    first, second = (WRITTEN[name] % message["content"] for message in (FIRST, SECOND))
    seen = spans(name, examples_of(name, tmp_path, {"messages": [ASKED, FIRST, AGAIN, SECOND]}))
    assert [texts[-1] for texts in seen] == ([first, second] if name in REWRITES else [second])
    if name == "deepseek_r1":  # its header opens a reasoning that the template does not write in answers
        assert seen == [["<bos><|User|>What is 12 + 3?<|Assistant|>", first, "<|User|>And then?<|Assistant|>", second]]
        return
    asked = rendered(name, [ASKED])
    asked_again = rendered(name, [ASKED, FIRST, AGAIN])
    if name in REWRITES:
        assert seen == [[asked, first], [asked_again, second]]
    else:
        assert seen == [[asked, first, asked_again.removeprefix(asked + first), second]]
    assert "".join(seen[0]).count("<bos>") <= 1 or name == "llama2"  # which begins each pair so


@pytest.mark.parametrize("name", STYLES)
def test_sft_spans_of_a_chat_prompt_and_its_response_are_those_of_the_messages(name, tmp_path):
    seen = spans(name, examples_of(name, tmp_path, {"prompt": [ASKED], "response": FIRST["content"]}))
    assert seen == spans(name, examples_of(name, tmp_path, {"messages": [ASKED, FIRST]}))
    assert seen[0][1] == WRITTEN[name] % FIRST["content"]
    # As TRL's conversational rows have it.
    assert seen == spans(name, examples_of(name, tmp_path, {"prompt": [ASKED], "response": [FIRST]}))


@pytest.mark.parametrize("name", STYLES)
def test_sft_spans_hold_calls_of_tools_or_the_row_is_refused(name, tmp_path):
    row = {"messages": [ASKED, CALLS, RESULT, FIRST], "tools": TOOLS}
    if name not in WRITTEN_CALL:
        with pytest.raises(
            ValueError, match=r"rows.jsonl:1: the chat template (leaves out the tools|refuses these mes)"
        ):
            examples_of(name, tmp_path, row)
        return
    seen = spans(name, examples_of(name, tmp_path, row))
    assert [texts[1] for texts in seen[:1]] == [WRITTEN_CALL[name]]
    assert seen[-1][-1] == WRITTEN[name] % FIRST["content"]
    assert seen[0][0] == rendered(name, [ASKED], TOOLS)
    assert "add" in seen[0][0]
    ends_with_calls = {"messages": [ASKED, {**CALLS, "content": ""}], "tools": json.dumps(TOOLS)}
    assert spans(name, examples_of(name, tmp_path, ends_with_calls)) == [seen[0][:2]]


@pytest.mark.parametrize("name", STYLES)
@pytest.mark.parametrize("field", [True, False])
def test_sft_spans_hold_the_reasoning_or_the_row_is_refused(name, field, tmp_path):
    """A field of its own, or tags in the text: the opened reasoning is never opened again."""
    answer = (
        {**FIRST, "reasoning_content": "so"} if field else {**FIRST, "content": "<think>\nso\n</think>\n\nit is 15"}
    )
    if field and name not in WITH_REASONING:
        with pytest.raises(
            ValueError, match="rows.jsonl:1: the chat template leaves out the reasoning of an answer; exp"
        ):
            examples_of(name, tmp_path, {"messages": [ASKED, answer]})
        return
    ((prompt, learnt),) = spans(name, examples_of(name, tmp_path, {"messages": [ASKED, answer]}))
    has_tags = not field and name not in WITH_REASONING  # the template takes them for text
    assert learnt == (WRITTEN[name] % answer["content"] if has_tags else WITH_REASONING[name])
    assert prompt == rendered(name, [ASKED])
    assert (prompt + learnt).count("<think>") == (name != "gpt_oss")


@pytest.mark.parametrize("content", ["<think>\nso\n</think>\n\n15", "so\n</think>\n\n15"])
def test_sft_spans_open_the_reasoning_once_where_header_and_answer_do(content, tmp_path):
    """A template that opens the reasoning itself, and takes the text of an answer as it is."""
    header = "{{ '<|im_start|>assistant\\n<think>\\n' }}"
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}" + header + "{{ m.content + '<|im_end|>' }}{% else %}"
        "{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}" + header + "{% endif %}"
    )
    file, tokenizer = tmp_path / "rows.jsonl", byte_tokenizer(template)
    file.write_text(json.dumps({"messages": [ASKED, {**FIRST, "content": content}]}))
    batch = SftExamples(str(file), tokenizer, RowSettings(999)).take(1)
    assert tokenizer.decode(batch.tokens).endswith("assistant\n<think>\nso\n</think>\n\n15<|im_end|>")
    assert tokenizer.decode(batch.tokens[batch.columns["response_mask"].bool()]) == "so\n</think>\n\n15<|im_end|>"


BAD_REASONING = [
    {"content": "FRONT <think>a</think>BACK"},
    {"content": "<think>a</think>MID<think>c</think>BACK"},
    {"content": "<think>cut off"},
    {"content": "<think>a</think>Say </think> at the end"},
    {"content": "<think>a</think>Ans", "reasoning_content": "R"},
    {"content": "Ans", "reasoning_content": "R", "thinking": "S"},
]


@pytest.mark.parametrize("name", ["qwen3", "qwen3_thinking", "glm4", "gpt_oss", "deepseek_r1"])
def test_sft_spans_refuse_reasoning_of_which_the_template_would_lose_a_part(name):
    """Also in an answer that is not learnt: the next one would stand behind another history."""
    answers = Answers(tokenizer_of(name), template_of(name))
    bad = [*BAD_REASONING, *([] if name in OPENS else [{"content": "Use the </think> tag to close"}])]
    examples = [
        Example("a:1", [ASKED], messages)
        for answer in bad
        for messages in ([FIRST | answer], [{**FIRST, "weight": 0, **answer}, AGAIN, SECOND])
    ]
    assert answers.sequences(examples) == [[]] * len(examples)
    assert all("a:1: an answer has reasoning in several places, or <think>" in each for each in answers.refused)


def test_sft_spans_hold_tags_as_text_where_the_template_has_no_reasoning():
    answers = Answers(tokenizer_of("chatml"), template_of("chatml"))
    for answer in BAD_REASONING[:4]:
        (((ids, mask),),) = answers.sequences([Example("a:1", [ASKED], [FIRST | answer])])
        learnt = [token for token, is_learnt in zip(ids, mask, strict=True) if is_learnt]
        assert tokenizer_of("chatml").decode(learnt) == answer["content"] + "<|im_end|>"
    assert not answers.refused


@pytest.mark.parametrize("name", sorted(set(WITH_REASONING) - {"deepseek_r1"}))
def test_sft_spans_put_the_reasoning_into_the_field_that_the_template_reads(name, tmp_path):
    ((_, learnt),) = spans(name, examples_of(name, tmp_path, {"messages": [ASKED, {**FIRST, "thinking": "so"}]}))
    assert learnt == WITH_REASONING[name]


def test_sft_spans_hold_no_header_of_a_template_that_always_writes_one(tmp_path):
    template = source("chatml").replace("if add_generation_prompt", "if true")
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"messages": [ASKED, FIRST, AGAIN, SECOND]}))
    for eos in ("<|im_end|>", "</s>"):
        tokenizer = byte_tokenizer(template, eos)
        batch = SftExamples(str(file), tokenizer, RowSettings(999)).take(1)
        learnt = tokenizer.decode(batch.tokens[batch.columns["response_mask"].bool()])
        assert learnt == "it is 15<|im_end|>ünd 16<|im_end|>"


class Counting:
    """A tokenizer that counts the characters that it is given."""

    def __init__(self, tokenizer):
        self._tokenizer, self.num_characters = tokenizer, 0

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)

    def __call__(self, texts, **how):
        self.num_characters += sum(map(len, texts))
        return self._tokenizer(texts, **how)


@pytest.mark.parametrize("name", ["chatml", "qwen3", "glm4", "llama2"])
def test_sft_spans_of_many_turns_are_encoded_once_and_as_a_whole(name):
    turns = [{**(ASKED, FIRST)[at % 2], "content": f"{at} words " * 20} for at in range(40)]
    tokenizer = Counting(tokenizer_of(name))
    ((*_, learnt),) = Answers(tokenizer, template_of(name)).sequences([Example("a:1", turns[:1], turns[1:])])
    text = template_of(name).text(turns, answer_follows=False)
    whole = tokenizer_of(name).encode(text, add_special_tokens=False)
    assert learnt.ids[: len(whole)] == whole[: len(learnt.ids)] and len(learnt.ids) > len(whole) - 2
    assert tokenizer.num_characters < 4 * len(text)


def test_sft_spans_are_those_of_whole_texts_where_a_tokenizer_does_not_divide_at_special_tokens():
    """A special token that takes the spaces in front of it is another one behind them."""
    tokenizer = byte_tokenizer(source("chatml"))
    tokenizer.add_special_tokens({"extra_special_tokens": [AddedToken("<|gap|>", lstrip=True, special=True)]})
    turns = [{**ASKED, "content": "one  <|gap|> two"}, FIRST]
    template = ChatTemplate(tokenizer)
    ((learnt,),) = Answers(tokenizer, template).sequences([Example("a:1", turns[:1], turns[1:])])
    whole = template.ids(template.text(turns, answer_follows=False))
    assert learnt.ids == whole[:-1]


def test_sft_spans_of_reasoning_in_the_history_are_what_the_template_leaves_of_it(tmp_path):
    thought = {**FIRST, "reasoning_content": "so"}
    row = {"messages": [ASKED, thought, AGAIN, {**SECOND, "reasoning_content": "then"}]}
    first, second = spans("qwen3", examples_of("qwen3", tmp_path, row))
    assert first[1] == "<think>\nso\n</think>\n\nit is 15<|im_end|>"
    assert "so" not in second[0], "the model does not see it when it answers again"
    assert second[1] == "<think>\nthen\n</think>\n\nünd 16<|im_end|>"


def test_sft_spans_leave_out_answers_by_key_and_by_weight(tmp_path):
    row = {"messages": [ASKED, FIRST, AGAIN, SECOND]}
    ((prompt, learnt),) = spans("chatml", examples_of("chatml", tmp_path, row, answers="last"))
    assert learnt == "ünd 16<|im_end|>"
    assert prompt == rendered("chatml", [ASKED, FIRST, AGAIN])
    row = {"messages": [ASKED, {**FIRST, "weight": 0}, AGAIN, {**SECOND, "weight": 1}]}
    assert spans("chatml", examples_of("chatml", tmp_path, row)) == [[prompt, learnt]]
    with pytest.raises(ValueError, match="rows.jsonl:1: no answer is learnt; expected one without a weight of 0"):
        examples_of("chatml", tmp_path, {"messages": [ASKED, {**FIRST, "train": False}]})


@pytest.mark.parametrize("name", ["llama3", "mistral", "command_r"])
def test_sft_spans_are_never_without_the_text_beside_a_call(name, tmp_path):
    row = {"messages": [ASKED, {**CALLS, "content": "I look."}], "tools": TOOLS}
    with pytest.raises(ValueError, match="rows.jsonl:1: the chat template leaves out the text of .* with calls"):
        examples_of(name, tmp_path, row)
    assert "I look." in spans("kimi", examples_of("kimi", tmp_path, row))[0][1]


def test_sft_spans_end_where_a_server_ends_or_the_end_is_told(tmp_path):
    """Base models have ChatML's template, and another end of text; a template may write no end at all."""
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"messages": [ASKED, FIRST]}) + "\n")
    for template, learnt, ends in (
        (source("chatml"), "it is 15<|im_end|>", ["<|im_end|>"]),
        (source("glm4"), "\n<think></think>\nit is 15</s>", []),
        ("{% for m in messages %}{{ m.role + ': ' + m.content + ';' }}{% endfor %}", "assistant: it is 15;</s>", []),
    ):
        tokenizer = byte_tokenizer(template, "</s>")
        examples = SftExamples(str(file), tokenizer, RowSettings(999))
        batch = examples.take(1)
        mask = batch.columns["response_mask"].bool()
        assert (tokenizer.decode(batch.tokens[mask]), examples.strange_ends) == (learnt, ends)


def test_sft_spans_divide_what_would_be_one_token_of_prompt_and_answer(tmp_path):
    """The model gets the prompt alone, so it sees no token that holds a part of the answer."""
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ '' if add_generation_prompt else eos_token }}"
    tokenizer = byte_tokenizer(template, "</s>")
    assert len(tokenizer.encode("user")) == 1
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"messages": [{**ASKED, "content": "us"}, {**FIRST, "content": "er"}]}))
    batch = SftExamples(str(file), tokenizer, RowSettings(9)).take(1)
    assert tokenizer.convert_ids_to_tokens(batch.tokens.tolist()) == ["us", "e", "r", "</s>"]
    assert batch.columns["response_mask"].tolist() == [0, 1, 1, 1]


def test_sft_spans_of_long_rows_are_refused_left_out_or_cut_and_counted(tmp_path):
    long = {"messages": [ASKED, {**FIRST, "content": "1" * 50}]}
    rows = [{"messages": [ASKED, FIRST]}, long, long]
    size = examples_of("chatml", tmp_path, rows[0]).take(1).num_tokens
    with pytest.raises(
        ValueError, match=r"rows.jsonl:2: .*sft.overlong_rows=filter, .* \(the first of 2 refused rows\)"
    ):
        examples_of("chatml", tmp_path, *rows, max_length=size)
    left = examples_of("chatml", tmp_path, *rows, max_length=size, overlong="filter")
    assert (len(left), left.num_rows, left.num_filtered, left.num_cut) == (1, 3, 2, 0)
    assert ", 2 are too long and left out" in left.said
    cut = examples_of("chatml", tmp_path, *rows, max_length=size, overlong="right")
    assert (len(cut), cut.num_filtered, cut.num_cut) == (3, 0, 2)
    assert ", 2 are too long and cut" in cut.said
    assert spans("chatml", cut)[1][1] == "1" * len(spans("chatml", cut)[1][1])
    end = examples_of("chatml", tmp_path, long, max_length=3, overlong="left").take(1)
    assert end.columns["response_mask"].tolist() == [0, 1, 1], "nothing predicts the first token"
    asks_long = {"messages": [{**ASKED, "content": "1" * 50}, FIRST]}
    nothing_left = examples_of("chatml", tmp_path, rows[0], asks_long, max_length=size, overlong="right")
    assert (len(nothing_left), nothing_left.num_filtered) == (1, 1)


def test_sft_spans_refuse_all_rows_that_the_template_refuses_with_the_first(tmp_path):
    system = {"role": "system", "content": "x"}
    rows = [
        {"messages": [ASKED, FIRST]},
        *[{"messages": [ASKED, ASKED, FIRST]}] * 2,
        {"messages": [system, ASKED, FIRST]},
    ]
    with pytest.raises(
        ValueError,
        match=r"rows.jsonl:2: the chat template refuses these messages: Conversation roles must alternate "
        r"\(the first of 2 refused rows\)$",
    ):
        examples_of("gemma", tmp_path, *rows)


def test_sft_spans_of_strings_have_one_beginning_and_one_end(tmp_path):
    file, tokenizer = tmp_path / "rows.jsonl", tiny_tokenizer()
    file.write_text(json.dumps({"prompt": "1+1=", "response": "2<eos>"}))
    batch = SftExamples(str(file), tokenizer, RowSettings(9)).take(1)
    assert tokenizer.decode(batch.tokens.tolist()) == "1+1=2<eos>"


def test_sft_spans_have_no_id_that_the_model_does_not_have(tmp_path):
    file, tokenizer = tmp_path / "rows.jsonl", tiny_tokenizer()
    file.write_text(json.dumps({"prompt": "1+1=", "response": "2"}))
    size = max(tokenizer.encode("1+1=2<eos>")) + 1
    assert len(SftExamples(str(file), tokenizer, RowSettings(9, num_ids=size))) == 1
    with pytest.raises(
        ValueError, match=rf"rows.jsonl:1: it holds the token .*, and the model has {size - 1} \(vocab_s"
    ):
        SftExamples(str(file), tokenizer, RowSettings(9, num_ids=size - 1))
