"""Plug-ins that cannot be loaded, and functions that their files do not have: one sentence with the setting."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from bad_input import Cases, read_refusal
from config_helpers import tables_kept

from megarl.algo import POLICY_LOSSES
from megarl.plugins.load import load_plugins, user_function

FILES = {
    "syntax": b"def f(:\n",
    "indent": b"if True:\nx = 1\n",
    "import": b"import no_such_package\n",
    "name": b"from os import no_such_name\n",
    "relative": b"from . import x\n",
    "raises": b"raise RuntimeError('no')\n",
    "asserts": b"assert False\n",
    "lines": b"raise ValueError('one\\ntwo\\nthree')\n",
    "exits": b"import sys; sys.exit(3)\n",
    "quits": b"raise SystemExit\n",
    "null": b"\0",
    "latin": b"x = '\xff'\n",
    "coding": b"# -*- coding: none-such -*-\n",
    "deep": b"x = " + b"(" * 3000 + b")" * 3000,
    "recursion": b"def f(): f()\nf()\n",
    "memory": b"x = bytearray(1 << 60)\n",
    "loss": b"from megarl.algo import register_policy_loss\nregister_policy_loss('a')(3)\n",
    "arguments": b"from megarl.algo import register_policy_loss\nregister_policy_loss()\n",
    "signature": b"from megarl.algo import register_policy_loss\n@register_policy_loss('a')\ndef f(): return 1\n",
    "twice": b"from megarl.algo import register_policy_loss\n@register_policy_loss('ppo')\ndef f(): return 1\n",
}


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    with tables_kept():
        yield


@pytest.mark.parametrize("name", FILES)
def test_bad_input_a_file_that_cannot_be_loaded_as_a_plugin_or_has_not_the_function(
    cases: Cases, tmp_path: Path, name: str
) -> None:
    file, before = tmp_path / f"{name}.py", dict(POLICY_LOSSES)
    file.write_bytes(FILES[name])
    for load in (lambda: load_plugins([str(file)]), lambda: user_function(f"agent.fn={file}:g", f"{file}:g")):
        cases.add()
        with pytest.raises(ValueError) as caught:
            load()
        read_refusal(caught.value, str(file))
        assert before == POLICY_LOSSES


def test_bad_input_plugins_that_are_not_there(cases: Cases, tmp_path: Path) -> None:
    (tmp_path / "folder.py").mkdir()
    files = [str(tmp_path / name) for name in ("absent.py", "folder.py", "x" * 300 + ".py", "a\0.py")]
    for spec in (*files, "~/a.py", "~nobody/a.py", "no_such_module", "a b", ".", "..a", "os.none", ""):
        cases.add()
        with pytest.raises(ValueError) as caught:
            load_plugins([spec])
        read_refusal(caught.value, "algorithm.plugins")
