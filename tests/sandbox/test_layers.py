"""The choice of a sandbox, and the sentence where there is none."""

import pytest

import megarl_sandbox
from megarl_sandbox import landlock, layers, seccomp
from megarl_sandbox.bubblewrap import Bubblewrap
from megarl_sandbox.jail import Jail
from megarl_sandbox.python import own_python, python_for_others
from megarl_sandbox.service import Service


def refusable():
    """Each sandbox of this machine's own with each of its steps that the kernel may refuse, by name."""
    cases = []
    if isinstance(found := layers.jail(), Jail):
        places = ["landlock.restrict", "seccomp.restrict"]
        places += ["namespaces.enter", "namespaces.own_root"] if found.with_namespaces else []
        cases += [pytest.param(found, place, id=f"jail-{place}") for place in places]
    if isinstance(found := layers.bubblewrap(), Bubblewrap):
        places = ["seccomp.filter_program", "bubblewrap.apply"]
        cases += [pytest.param(found, place, id=f"bubblewrap-{place}") for place in places]
    assert cases, "no sandbox works here: `megarl doctor` says what is missing"
    return cases


@pytest.fixture(autouse=True)
def nothing_remembered():
    def forget():
        for function in (layers.jail, layers.bubblewrap, layers._fault):
            function.cache_clear()

    forget()
    yield
    forget()


def test_the_kernels_own_layers_are_preferred():
    assert isinstance(megarl_sandbox.check("auto"), Jail | Bubblewrap)
    assert megarl_sandbox.run("print(1 + int(input()))", stdin="2").stdout == "3\n"


def test_without_a_sandbox_code_does_not_run_and_the_error_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(landlock, "abi", lambda: 0)
    monkeypatch.setattr("shutil.which", lambda name: None)
    wanted = (
        r"^code cannot be confined on this machine: jail needs Landlock .*; bubblewrap needs the program bwrap: apt"
    )
    with pytest.raises(megarl_sandbox.SandboxError, match=wanted):
        megarl_sandbox.run("print(1)")
    with pytest.raises(megarl_sandbox.SandboxError, match="machine: jail needs Landlock [^;]*$"):
        megarl_sandbox.check("jail")
    with pytest.raises(megarl_sandbox.SandboxError, match="machine: bubblewrap needs the program bwrap[^;]*$"):
        megarl_sandbox.check("bubblewrap")
    *_, whole = layers.layers()
    assert not whole.is_there and "cannot be confined" in whole.found


def test_a_processor_without_a_list_of_calls_has_no_sandbox(monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    assert not seccomp.is_supported()
    with pytest.raises(megarl_sandbox.SandboxError, match="seccomp on x86-64 or ARM"):
        megarl_sandbox.check("auto")


def test_without_landlock_bubblewrap_is_used_if_it_works(monkeypatch):
    found = layers.bubblewrap()
    monkeypatch.setattr(landlock, "abi", lambda: 0)
    if isinstance(found, Bubblewrap):
        assert layers.check("auto") == found
    else:
        with pytest.raises(megarl_sandbox.SandboxError):
            layers.check("auto")


@pytest.mark.parametrize(("found", "place"), refusable())
def test_a_layer_that_the_kernel_refuses_stops_the_program(found, place, monkeypatch):
    """Never is a program started with fewer."""

    def refuse(*arguments, **options):
        raise OSError(1, "refused")

    monkeypatch.setattr(f"megarl_sandbox.{place}", refuse)
    with pytest.raises(megarl_sandbox.SandboxError, match="could not be confined, and did not run: .*refused"):
        megarl_sandbox.run("print(1)", sandbox=found)


@pytest.mark.parametrize(
    "bwrap", [found.bwrap] if isinstance(found := layers.bubblewrap(), Bubblewrap) else ["/bin/false"]
)
def test_a_bubblewrap_that_fails_is_an_error_and_not_a_failed_program(bwrap, monkeypatch):
    monkeypatch.setattr("megarl_sandbox.bubblewrap.DEVICES", ("/dev/there is none",))
    python = python_for_others() or own_python()
    with pytest.raises(megarl_sandbox.SandboxError, match="could not be confined, and did not run: "):
        megarl_sandbox.run("print(1)", sandbox=Bubblewrap(python, bwrap))


def test_the_choices_of_the_configuration():
    assert all(map(layers.is_known, ("auto", "jail", "bubblewrap", "url:http://h:1", "url:https://h")))
    assert not any(map(layers.is_known, ("off", "", "url:", "url:ftp://h", "http://h:1")))
    assert megarl_sandbox.check("url:http://h:1") == Service("http://h:1")


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_numbers_of_system_calls(machine):
    numbers = seccomp.numbers(machine)
    assert len(set(numbers.values())) == len(numbers) > 100
    assert numbers["clone"] == {"x86_64": 56, "aarch64": 220}[machine]
    assert not numbers.keys() & {"socket", "connect", "ptrace", "mount", "unshare", "setsid", "setpgid", "chmod"}
