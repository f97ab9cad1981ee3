"""The run's token: where it may come from, and what is made of it."""

from dataclasses import fields
from pathlib import Path

import pytest

from megarl.io.auth import derived, given_token, needed_token, server_token, without_tokens
from megarl.roles.teacher_servers import TeacherServers
from megarl.rollout.collector.collector import CollectorSettings
from megarl.weights.push.settings import PushSettings

TOKEN = "0123456789abcdef"


def test_it_comes_from_the_environment_or_from_a_private_file(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(TOKEN + "\n")
    file.chmod(0o600)
    assert given_token({}) is None
    assert given_token({"MEGARL_TOKEN": TOKEN}) == TOKEN
    assert given_token({"MEGARL_TOKEN_FILE": str(file)}) == TOKEN


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_a_file_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    file = tmp_path / "token"
    file.write_text(TOKEN)
    file.chmod(mode)
    with pytest.raises(ValueError, match=r"others can read it; expected `chmod 600 "):
        given_token({"MEGARL_TOKEN_FILE": str(file)})


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("MEGARL_TOKEN_FILE", "/nowhere/none", "=/nowhere/none: No such file or directory; expected a file"),
        ("MEGARL_TOKEN", "fifteen letters", ": expected at least 16 characters"),
        # Who sees a certificate that is derived from it can try keys as fast as he computes.
        ("MEGARL_SERVER_TOKEN", "fifteen letters", ": expected at least 16 characters"),
    ],
)
def test_a_missing_file_and_a_token_that_could_be_guessed_are_refused(variable: str, value: str, words: str) -> None:
    with pytest.raises(ValueError, match=f"^{variable}{words}"):
        server_token({variable: value}, TOKEN)
        given_token({variable: value})


def test_who_needs_it_says_why() -> None:
    assert needed_token({"MEGARL_TOKEN": TOKEN}, "trainer.nnodes=2") == TOKEN
    with pytest.raises(ValueError, match=r"^trainer.nnodes=2: expected the run's token in MEGARL_TOKEN, or in a file"):
        needed_token({}, "trainer.nnodes=2")


def test_servers_have_a_key_of_their_own() -> None:
    assert server_token({}, TOKEN) == derived(TOKEN, "servers") != TOKEN
    assert derived(TOKEN, "servers") != derived(TOKEN, "others")
    assert server_token({"MEGARL_SERVER_TOKEN": "the key of theirs"}, TOKEN) == "the key of theirs"
    assert server_token({"MEGARL_SERVER_TOKEN": ""}, TOKEN) == derived(TOKEN, "servers")


def test_a_child_that_does_not_need_them_gets_none() -> None:
    secrets = {"MEGARL_TOKEN": "1", "MEGARL_TOKEN_FILE": "2", "MEGARL_SERVER_TOKEN": "3"}
    assert without_tokens({"PATH": "/bin", **secrets}) == {"PATH": "/bin"}


def test_the_words_of_an_object_do_not_tell_its_key() -> None:
    """They stand in tracebacks, and so in logs."""
    push = PushSettings(("http://a:1",), "the-secret")
    servers = TeacherServers(lambda: ("http://a:1",), "the-secret")
    values = dict.fromkeys((field.name for field in fields(CollectorSettings)), "x") | {"token": "the-secret"}
    for shown in (push, servers, CollectorSettings(**values)):  # type: ignore[arg-type]
        assert shown.token == "the-secret"
        assert "the-secret" not in f"{shown!r} {shown}"
