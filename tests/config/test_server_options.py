"""Options of a server as a list of words."""

from megarl.config.server_options import options_of


def test_a_value_stands_behind_an_equals_sign_or_in_the_words_that_follow() -> None:
    words = ["--dtype=half", "--enable-lora", "--targets", "a", "b", "--params={}"]
    assert list(options_of(words)) == [
        ("--dtype", "half"),
        ("--enable-lora", ""),
        ("--targets", "a b"),
        ("--params", "{}"),
    ]
    assert list(options_of([])) == []
