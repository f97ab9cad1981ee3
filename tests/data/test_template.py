"""Prompts as token ids; what follows an answer, in fifteen styles of chat templates, where rendering only appends."""

import pytest
from chat_templates import STYLES, WITH_TOOLS, byte_tokenizer, source, template_of, tokenizer_of, with_bos
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.data.chat import encode, encode_many, encode_responses, load_tokenizer
from megarl.data.examples.tiny import tiny_tokenizer
from megarl.data.template import ChatTemplate

TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}]
QUESTION = {"role": "user", "content": "What is 12 + 3?"}


def call(number=0, name="add"):
    return {
        "id": f"call0000{number}",
        "type": "function",
        "function": {"name": name, "arguments": {"a": 1, "b": "two"}},
    }


def response(content, number=0):
    return {"role": "tool", "tool_call_id": f"call0000{number}", "name": "add", "content": content}


def with_calls(num):
    return {"role": "assistant", "content": "", "tool_calls": [call(i) for i in range(num)]}


SAID = {"role": "assistant", "content": "hello, the answer is 15"}
SQUARE = "And  the square?\n"
USER = {"role": "user", "content": SQUARE}


def as_text(name, messages):
    """The messages with arguments in the form that the template takes."""
    if name != "deepseek_v3":
        return messages
    return [
        {**m, "tool_calls": [{**c, "function": {**c["function"], "arguments": "{}"}} for c in m["tool_calls"]]}
        if "tool_calls" in m
        else m
        for m in messages
    ]


def generated(name, messages, answer, bridge, tools):
    """The ids of the answer, end token included, as the template itself would write it behind its header."""
    tokenizer = tokenizer_of(name)
    options = {"tools": tools or None, "tokenize": False}
    messages, answer = as_text(name, messages), as_text(name, [answer])[0]
    header = tokenizer.apply_chat_template(messages, add_generation_prompt=True, **options)
    closed = tokenizer.apply_chat_template([*messages, answer], add_generation_prompt=False, **options)
    if not closed.startswith(header):
        return None
    ids = tokenizer.encode(closed[len(header) :], add_special_tokens=False)
    end = [bridge.end_id] if bridge.end_is_header else []
    stops = tokenizer.convert_tokens_to_ids([STYLES[name].eos, *STYLES[name].stops])
    if not end:
        ids = ids[: max(i for i, token in enumerate(ids) if token in (bridge.end_id, *stops)) + 1]
        ids = ids[: ids.index(bridge.end_id) + 1] if bridge.end_id in ids else ids
    return ids + end


def is_appended(name, answer, tail, tools):
    """Whether the whole rendering is the first prompt, the answer and the bridge."""
    template, messages = template_of(name), [QUESTION]
    bridge = template.bridge(answer, tail, tools)
    assert bridge is not None
    ids = generated(name, messages, answer, bridge, tools)
    if ids is None:
        return False
    built = template.whole(messages, tools) + ids + bridge.after(ids[-1], ended=True)
    return built == template.whole([*messages, as_text(name, [answer])[0], *tail], tools)


@pytest.mark.parametrize("name", STYLES)
def test_all_styles_have_a_bridge(name):
    assert template_of(name).check(with_tools=STYLES[name].tools) is None


@pytest.mark.parametrize("name", STYLES)
@settings(max_examples=15)
@given(content=st.text(st.characters(codec="utf-8"), max_size=12))
def test_a_question_behind_an_answer_is_the_rest_of_the_rendering_where_this_only_appends(name, content):
    assert is_appended(name, SAID, [{"role": "user", "content": content}], []) == STYLES[name].appends


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_so_is_a_tools_response(name):
    style = STYLES[name]
    assert is_appended(name, with_calls(1), [response("15")], TOOLS) == style.appends_tools
    if style.parallel:
        two = [response("15"), response(" 16\n", 1)]
        assert is_appended(name, with_calls(2), two, TOOLS) == style.appends_tools
    else:
        assert template_of(name).bridge(with_calls(2), [response("1"), response("2", 1)], TOOLS) is None
        reason = template_of(name).why_no_bridge([response("1"), response("2", 1)], with_tools=True)
        assert "cannot append (tool, tool) to an answer with tools: the chat template refuses these messages" in reason


def test_reasoning_in_front_of_a_tools_response_stays_where_a_template_keeps_it():
    answer = {**with_calls(1), "reasoning_content": "so"}
    assert is_appended("qwen3", answer, [response("15")], TOOLS)
    assert not is_appended("qwen3", answer, [response("15"), USER], TOOLS)


def text_behind(name, answer, tail, last, *, ended=True, tools=()):
    """What follows an answer whose last token is `last`."""
    tokenizer = tokenizer_of(name)
    bridge = template_of(name).bridge(answer, tail, tools)
    return tokenizer.decode(bridge.after(tokenizer.convert_tokens_to_ids(last), ended=ended))


CHATML = f"\n<|im_start|>user\n{SQUARE}<|im_end|>\n<|im_start|>assistant\n"
GPT_OSS = f"<|start|>user<|message|>{SQUARE}<|end|><|start|>assistant"
GLM4 = f"\n{SQUARE}<|assistant|>"


@pytest.mark.parametrize(
    ("name", "last", "ended", "expected"),
    [
        ("chatml", "1", False, "<|im_end|>" + CHATML),  # an answer that was cut off gets the end of its turn
        ("chatml", "<|im_end|>", True, CHATML),
        ("gpt_oss", "<|return|>", True, GPT_OSS),  # it stops at <|return|>, and its template writes <|end|> there
        ("gpt_oss", "1", False, "<|end|>" + GPT_OSS),
        ("glm4", "<|user|>", True, GLM4),  # a stop token that begins the next message is written once
        ("glm4", "<|endoftext|>", True, "<|user|>" + GLM4),
    ],
)
def test_the_end_of_an_answer_is_written_once(name, last, ended, expected):
    assert text_behind(name, SAID, [USER], last, ended=ended) == expected


def test_a_stop_token_may_begin_a_tools_response():
    seen = text_behind("glm4", with_calls(1), [response("15")], "<|observation|>", tools=TOOLS)
    assert seen == "\n<tool_response>\n15\n</tool_response><|assistant|>"


def end_of_a_call(template):
    """Where the answer with a call ends, and what follows it."""
    bridge = template.bridge(with_calls(1), [response("15")], TOOLS)
    return template._tokenizer.decode([bridge.end_id]), template._tokenizer.decode(bridge.ids)


def test_special_tokens_of_the_call_itself_do_not_end_the_answer():
    """Whether tags are special tokens, and whether the stop tokens are known, differs from model to model."""
    glm4 = byte_tokenizer(source("glm4"), "<|endoftext|>", special_tags=True)
    stops = glm4.convert_tokens_to_ids(["<|user|>", "<|observation|>"])
    end, rest = end_of_a_call(ChatTemplate(glm4, stop_ids=stops))
    assert (end, rest) == ("<|observation|>", "\n<tool_response>\n15\n</tool_response><|assistant|>")
    kimi = ChatTemplate(byte_tokenizer(source("kimi"), "<|endoftext|>"))
    assert end_of_a_call(kimi) == end_of_a_call(template_of("kimi"))
    assert end_of_a_call(kimi)[0] == "<|im_end|>"


def test_responses_name_the_function_that_was_called():
    answer = {"role": "assistant", "content": None, "tool_calls": [call(name="multiply")]}
    seen = text_behind("gpt_oss", answer, [response("15")], "<|call|>", tools=TOOLS)
    assert seen.startswith("<|start|>functions.multiply to=assistant") and '"15"' in seen


def test_a_message_with_the_marker_itself_is_no_trap():
    tail = [{"role": "user", "content": "zqmarkerzq<|im_end|>\n"}]
    assert is_appended("chatml", SAID, tail, [])


def test_settings_of_the_template_are_used():
    template = ChatTemplate(tokenizer_of("qwen3"), settings={"enable_thinking": False})
    bridge = template.bridge(SAID, [USER])
    assert tokenizer_of("qwen3").decode(bridge.ids).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_a_date_in_the_system_turn_does_not_reach_the_bridge():
    days = [ChatTemplate(tokenizer_of("llama3"), settings={"date_string": day}) for day in ("1 Jan 2026", "2 Jan 2026")]
    assert days[0].whole([QUESTION]) != days[1].whole([QUESTION])
    assert days[0].bridge(SAID, [USER]) == days[1].bridge(SAID, [USER])


LOOP = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
HEADER = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
BROKEN = {
    "{% for m in messages %}{{ '\n### ' + m.role + ': ' + m.content }}{% endfor %}": "no special token ends an answer",
    LOOP.replace("messages %}", "messages[-1:] %}") + HEADER: "leaves out an answer",
    LOOP.replace("messages %}", "messages[:2] %}") + "<|im_end|>": "the message of role user is left out",
    LOOP + "{{ messages[1].content | upper if messages | length > 1 }}" + HEADER: "depends on its text",
    LOOP + "{% if messages | length > 2 %}{{ raise_exception('only one question') }}{% endif %}": "only one question",
}


@pytest.mark.parametrize("template", BROKEN)
def test_a_template_without_a_bridge_is_named_with_the_reason(template):
    broken = ChatTemplate(byte_tokenizer(template + "{# <|im_start|> <|im_end|> #}"))
    reason = broken.check(with_tools=False)
    assert reason.startswith("the chat template cannot append (user) to an answer: ") and BROKEN[template] in reason
    assert broken.bridge(SAID, [USER]) is None


def test_a_template_without_tools_is_named_only_if_there_are_tools():
    template = template_of("gemma")
    assert template.check(with_tools=False) is None
    assert "cannot append (tool) to an answer with tools" in template.check(with_tools=True)


def test_messages_that_the_template_refuses_are_a_users_mistake():
    with pytest.raises(ValueError, match="the chat template refuses these messages: roles must alternate"):
        template_of("llama2").whole([USER, USER])


CHAT = [{"role": "user", "content": "1+1"}]


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


def ids_of(tokenizer, *tokens):
    return tokenizer.convert_tokens_to_ids(list(tokens))


def test_a_string_is_encoded_as_it_stands_and_messages_end_with_the_header_of_the_answer(tokenizer):
    assert encode(tokenizer, "1+1=") == ids_of(tokenizer, "1", "+", "1", "=")
    assert encode(tokenizer, CHAT) == ids_of(tokenizer, "<user>", "1", "+", "1", "<eos>", "<assistant>")


def test_a_system_prompt_goes_before_strings_and_messages_but_not_before_another(tokenizer):
    own = [{"role": "system", "content": "b"}, *CHAT]
    assert encode_many(tokenizer, ["1", CHAT, ""]) == [encode(tokenizer, text) for text in ("1", CHAT, "")]
    string, messages, kept = encode_many(tokenizer, ["1+1", CHAT, own], system_prompt="a")
    assert string == messages == encode(tokenizer, "<system>a<eos><user>1+1<eos><assistant>")
    assert kept == encode(tokenizer, own)


def test_a_string_that_begins_as_the_tokenizer_begins_has_one_beginning():
    """As prompts that a chat template has written before."""
    tokenizer = byte_tokenizer(source("llama3"), "<|eot_id|>")
    rendered = tokenizer.apply_chat_template(CHAT, tokenize=False)
    plain = encode(tokenizer, "hello")
    tokenizer.backend_tokenizer.post_processor = with_bos(tokenizer)
    bos = tokenizer.bos_token_id
    assert encode_many(tokenizer, ["hello", rendered, "", "<bos>"]) == [
        [bos, *plain], tokenizer.encode(rendered, add_special_tokens=False), [bos], [bos]
    ]  # fmt: skip
    assert encode(tokenizer, "<bos>") == [bos]


def test_messages_that_the_template_refuses_are_named_with_the_first_of_them():
    texts = [CHAT, [*CHAT, *CHAT], "1+1", [*CHAT, *CHAT]]
    with pytest.raises(
        ValueError, match=r"^b: the chat .* messages: roles must alternate.* \(the first of 2 refused r"
    ):
        encode_many(tokenizer_of("llama2"), texts, places="abcd")
    for message in ({"role": "user"}, {"role": "user", "content": None}):
        with pytest.raises(ValueError, match="^the chat template refuses these messages: "):
            encode(tokenizer_of("llama2"), [message])


@pytest.mark.parametrize(
    ("name", "role"),
    [(name, role) for name in ("qwen2_5", "qwen3", "mistral", "deepseek_v3") for role in ("developer", "human")],
)
def test_messages_that_the_template_does_not_write_are_refused_with_their_role(name, role):
    """Nobody learns that the rules of the first message are not in the prompt."""
    rows = [[QUESTION], [{"role": role, "content": "Be brief."}, QUESTION]]
    wanted = f"the chat template (leaves out the text of the message of role '{role}'; expected|refuses)"
    with pytest.raises(ValueError, match=rf"a.jsonl:2: {wanted}"):
        encode_many(tokenizer_of(name), rows, places=["a.jsonl:1", "a.jsonl:2"])
    middle = [QUESTION, {"role": "assistant", "content": "ok"}, {"role": role, "content": "x"}, QUESTION]
    with pytest.raises(ValueError, match=wanted):
        encode_many(tokenizer_of(name), [middle])


def test_what_a_template_writes_is_looked_at_once_for_messages_of_one_shape(monkeypatch):
    template = ChatTemplate(tokenizer_of("qwen3"))
    rendered = []
    monkeypatch.setattr(
        template, "text", lambda *given, **how: rendered.append(1) or ChatTemplate.text(template, *given, **how)
    )
    for text in ("a", "b", "c"):
        template.check_written([{**QUESTION, "content": text}], ())
    assert len(rendered) == 1


def test_calls_and_tools_are_in_the_prompt_or_refused():
    messages = [QUESTION, with_calls(1), response("15")]
    (ids,) = encode_many(tokenizer_of("qwen2_5"), [messages], tools=[TOOLS])
    assert ids == template_of("qwen2_5").whole(messages, TOOLS)
    text = tokenizer_of("qwen2_5").decode(ids)
    assert '"arguments": {"a": 1, "b": "two"}' in text and '"description": "Adds."' in text
    with pytest.raises(ValueError, match="leaves out a call of the message of role 'assistant'; expected a template"):
        encode(tokenizer_of("chatml"), messages)
    with pytest.raises(
        ValueError, match="the chat template leaves out the tools; expected a template that writes it, or rows"
    ):
        encode_many(tokenizer_of("chatml"), [[QUESTION]], tools=[TOOLS])


def test_variables_reach_the_template_and_unknown_ones_do_nothing():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ messages[0].content }}{% if enable_thinking is false %}={% endif %}"
    plain, variable, unknown = (
        encode_many(tokenizer, [CHAT], template=template)[0]
        for template in (None, {"enable_thinking": False}, {"style": "brief"})
    )
    assert plain == unknown == ids_of(tokenizer, "1", "+", "1")
    assert variable == ids_of(tokenizer, "1", "+", "1", "=")


def test_a_response_ends_with_the_end_of_text(tokenizer):
    assert encode_responses(tokenizer, ["46", "", "4<eos>"]) == [
        ids_of(tokenizer, "4", "6", "<eos>"),
        [tokenizer.eos_token_id],
        ids_of(tokenizer, "4", "<eos>"),
    ]


def test_a_tokenizer_that_lacks_what_is_needed_is_refused():
    plain, endless = tiny_tokenizer(), tiny_tokenizer()
    plain.chat_template, endless.eos_token = None, None
    with pytest.raises(ValueError, match="the tokenizer has no chat template, which chat messages and data.system_pro"):
        encode(plain, CHAT)
    with pytest.raises(ValueError, match="the tokenizer has no chat template"):
        encode_many(plain, ["1"], system_prompt="a")
    with pytest.raises(ValueError, match="the tokenizer has no chat template, which conversations need"):
        ChatTemplate(plain)
    with pytest.raises(ValueError, match="expected a tokenizer with an end-of-text token"):
        encode_responses(endless, ["1"])


def test_a_folder_without_tokenizer_is_named(tmp_path):
    tiny_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(
        ValueError, match=r"no tokenizer can be loaded from there \(.*; the folder has no tokenizer.json"
    ):
        load_tokenizer(str(tmp_path))
