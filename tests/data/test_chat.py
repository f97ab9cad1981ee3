import pytest

from megarl.data.chat import encode, encode_many, encode_responses, load_tokenizer
from megarl.data.examples.tiny import tiny_tokenizer

USER = [{"role": "user", "content": "1+1"}]


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


def ids_of(tokenizer, *tokens):
    return tokenizer.convert_tokens_to_ids(list(tokens))


def test_a_string_is_encoded_as_it_stands(tokenizer):
    assert encode(tokenizer, "1+1=") == ids_of(tokenizer, "1", "+", "1", "=")


def test_messages_end_with_the_header_of_the_answer(tokenizer):
    assert encode(tokenizer, USER) == ids_of(tokenizer, "<user>", "1", "+", "1", "<eos>", "<assistant>")


def test_many_are_encoded_in_order_whatever_their_shape(tokenizer):
    texts = ["1", USER, "", "2"]
    assert encode_many(tokenizer, texts) == [encode(tokenizer, text) for text in texts]


def test_a_system_prompt_goes_before_strings_and_messages_but_not_before_another(tokenizer):
    own = [{"role": "system", "content": "b"}, *USER]
    string, messages, kept = encode_many(tokenizer, ["1+1", USER, own], system_prompt="a")
    assert string == messages == encode(tokenizer, "<system>a<eos><user>1+1<eos><assistant>")
    assert kept == encode(tokenizer, own)


def test_variables_reach_the_template_and_unknown_ones_do_nothing():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ messages[0].content }}{% if enable_thinking is false %}={% endif %}"
    plain, variable, unknown = (
        encode_many(tokenizer, [USER], template=template)[0]
        for template in (None, {"enable_thinking": False}, {"style": "brief"})
    )
    assert plain == unknown == ids_of(tokenizer, "1", "+", "1")
    assert variable == ids_of(tokenizer, "1", "+", "1", "=")


def test_a_response_ends_with_the_end_of_text(tokenizer):
    assert encode_responses(tokenizer, ["46", ""]) == [ids_of(tokenizer, "4", "6", "<eos>"), [tokenizer.eos_token_id]]


def test_messages_without_a_chat_template_are_refused():
    plain = tiny_tokenizer()
    plain.chat_template = None
    with pytest.raises(ValueError, match="the tokenizer has no chat template, which chat messages and data.system_pro"):
        encode(plain, USER)
    with pytest.raises(ValueError, match="the tokenizer has no chat template"):
        encode_many(plain, ["1"], system_prompt="a")


def test_a_tokenizer_without_an_end_is_refused_for_responses():
    endless = tiny_tokenizer()
    endless.eos_token = None
    with pytest.raises(ValueError, match="expected a tokenizer with an end-of-text token"):
        encode_responses(endless, ["1"])


def test_a_folder_without_tokenizer_is_named(tmp_path):
    with pytest.raises(ValueError, match=f"model.tokenizer_path={tmp_path}: no tokenizer can be loaded from there"):
        load_tokenizer(str(tmp_path))
