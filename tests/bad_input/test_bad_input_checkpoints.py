"""Saves whose files were cut, changed or taken away: the file is named."""

import json
from pathlib import Path
from typing import Any

import pytest
from bad_input import Cases, read_refusal
from saved_runs import save_steps

from megarl.trainer.checkpoint.checkpoint import MANIFEST, Damaged, faults_in, read_manifest

OTHERS: tuple[Any, ...] = (None, 3, "a", [], {}, {"a": 1})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_steps(tmp_path, 3)
    return tmp_path / "step_00000003"


def test_bad_input_a_manifest_that_is_none(cases: Cases, folder: Path) -> None:
    file = folder / MANIFEST
    whole = file.read_bytes()
    content = json.loads(whole)
    changed = [whole[:end] for end in range(0, len(whole), 40)]
    changed += [whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in range(0, len(whole), 40)]
    changed += [b"[" * 99_999, b"\xff", b"null", b"3", b"[]", b'"a"', b"{}", b'{"sha256": 3}', whole + b" "]
    for key in content:
        changed += [json.dumps(content | {key: value}).encode() for value in OTHERS]
    for text in changed:
        cases.add()
        file.write_bytes(text)
        with pytest.raises(Damaged) as caught:
            read_manifest(folder)
        read_refusal(caught.value, str(file))
        assert faults_in(folder, reads=True)
