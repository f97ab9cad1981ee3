"""`megarl doctor --listen` and `--peer`: the speed of a network between two processes with one token."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from megarl.doctor import link
from megarl.doctor.finding import FAIL

TOKEN, OTHER = "a" * 32, "b" * 32


@contextlib.contextmanager
def listener(token: str = TOKEN) -> Iterator[tuple["subprocess.Popen[str]", link.Place]]:
    words = [sys.executable, "-m", "megarl", "doctor", "--listen", "127.0.0.1:0"]
    environment = {**os.environ, "MEGARL_TOKEN": token}
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment) as program:
        try:
            assert program.stdout is not None
            line = program.stdout.readline()
            yield program, link.place_of(line.split("--peer ")[1].split()[0], "--peer")
        finally:
            program.terminate()


def line_of(program: "subprocess.Popen[str]") -> str:
    assert program.stdout is not None
    return program.stdout.readline()


def test_two_processes_measure_round_trip_and_both_directions(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from megarl.cli import main

    monkeypatch.setenv("MEGARL_TOKEN", TOKEN)
    with listener() as (program, place):
        assert main(["doctor", "--json", f"--peer={place}"]) == 0
        rows = json.loads(capsys.readouterr().out)["findings"]["network"]
        assert [row["subject"] for row in rows] == [
            f"network to {place}, {what}" for what in ("round trip", "sent", "received")
        ]
        trip, sent, received = (row["value"] for row in rows)
        assert 0 < trip < 1, "seconds"
        assert min(sent, received) > 2**20, "bytes a second, over loopback"
        assert line_of(program) == "measured from 127.0.0.1\n"


def test_another_token_is_refused_on_both_sides() -> None:
    with listener() as (program, place):
        (row,) = link.findings(place, OTHER)
        assert (row.verdict, row.found) == (FAIL, "what listens there does not have the same token")
        assert line_of(program) == "refused 127.0.0.1: it does not have the same token\n"
        assert len(link.findings(place, TOKEN)) == 3, "and the listener goes on"


def test_a_stranger_learns_nothing_and_does_not_stop_the_listener() -> None:
    with listener() as (program, place):
        with socket.create_connection(place, timeout=60) as stranger:
            nonce = stranger.recv(32)
            stranger.sendall(nonce + bytes(32))
            assert stranger.recv(64) == b"", "closed"
        assert line_of(program).startswith("refused 127.0.0.1")
        with socket.create_connection(place):
            pass
        assert line_of(program).startswith("lost 127.0.0.1")
        assert len(link.findings(place, TOKEN)) == 3


def test_a_listener_that_only_repeats_is_not_believed() -> None:
    """Who answers a proof with the same bytes does not have the token: the two sides' proofs differ."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        key = link._key(TOKEN)

        def repeat() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(bytes(32))
                told = link._exactly(connection, 64)
                connection.sendall(told[32:])

        thread = threading.Thread(target=repeat)
        thread.start()
        with pytest.raises(OSError, match="does not have the same token"):
            link._connect(link.Place("127.0.0.1", server.getsockname()[1]), key, b"P")
        thread.join()


def test_nobody_there_is_a_failure_with_the_command_for_the_other_side() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = link.Place("127.0.0.1", server.getsockname()[1])
    (row,) = link.findings(place, TOKEN)
    assert (row.verdict, "refused" in row.found) == (FAIL, True)
    assert row.mend == f"megarl doctor --listen {place}  # there, with the same token"


@pytest.mark.parametrize(
    "text", ["10.0.0.1", "10.0.0.1:x", ":80", "", "10.0.0.1:80/a", "a@10.0.0.1:80", "1.2.3.4:99999", "a..b:80"]
)
def test_what_is_no_place_is_refused_in_a_sentence(text: str) -> None:
    with pytest.raises(ValueError, match="expected ADDRESS:PORT, such as 10.0.0.1:29400"):
        link.place_of(text, "--peer")


def test_places_of_both_families_are_read() -> None:
    assert link.place_of("node1:29400", "--peer") == ("node1", 29400)
    assert str(link.place_of("[fd00::1]:29400", "--peer")) == "[fd00::1]:29400"


@pytest.mark.parametrize("option", ["--listen", "--peer"])
def test_without_a_token_nothing_is_measured(
    option: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from megarl.cli import main

    monkeypatch.delenv("MEGARL_TOKEN", raising=False)
    assert main(["doctor", option, "127.0.0.1:0"]) == 2
    assert f"megarl doctor {option} 127.0.0.1:0: expected the run's token in MEGARL_TOKEN" in capsys.readouterr().err
