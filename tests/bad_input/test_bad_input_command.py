"""One input of each kind through the command: exit code 2, a line, no traceback, and the run that was there stays."""

import json
from pathlib import Path
from typing import Any

import pytest
from bad_input import Cases

from megarl.cli import main
from megarl.data.examples.tiny import write_tiny_model

KIND = "through the command"
ROW = json.dumps({"prompt": "1+1=", "ground_truth": "2"})


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    """A command line that is one, over the folder of an earlier run."""
    sizes: dict[str, Any] = {"hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn": 48}
    model = write_tiny_model(tmp_path / "model", **sizes)
    (tmp_path / "rows.jsonl").write_text(f"{ROW}\n")
    (tmp_path / "runs" / "earlier").mkdir(parents=True)
    (tmp_path / "runs" / "earlier" / "summary.json").write_text("{}")
    named = (f"trainer.default_local_dir={tmp_path}/runs", "trainer.experiment_name=earlier", "rollout.engine=hf")
    return [f"model.path={model}", f"data.val_files=[{tmp_path}/rows.jsonl]", *named]


@pytest.mark.parametrize(
    "kind", ["configuration", "several", "file", "model", "tokenizer", "data", "plug-in", "missing"]
)
def test_bad_input_through_the_command(
    cases: Cases, tmp_path: Path, words: list[str], kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    cases.add()
    lines = 1
    if kind == "configuration":
        words, named = [*words, "rollout.val_kwargs.n=two"], "rollout.val_kwargs.n=two: expected an integer"
    elif kind == "several":
        words, named, lines = [*words, "rollout.val_kwargs.n=two", "trainer.seed=-1"], "trainer.seed=-1: expected", 2
    elif kind == "file":
        (tmp_path / "a.yaml").write_bytes(b"\xff")
        words, named = [*words, "--config", f"{tmp_path}/a.yaml"], f"{tmp_path}/a.yaml: cannot be read"
    elif kind == "model":
        (tmp_path / "model" / "config.json").write_text("[]")
        named = f"model.path={tmp_path}/model: its config.json"
    elif kind == "tokenizer":
        for file in (tmp_path / "model").glob("tokenizer*"):
            file.unlink()
        named = f"model.tokenizer_path={tmp_path}/model"
    elif kind == "data":
        (tmp_path / "rows.jsonl").write_bytes(f"{ROW}\n\xff\n".encode("latin-1"))
        named = f"{tmp_path}/rows.jsonl:2: not JSON"
    elif kind == "plug-in":
        (tmp_path / "a.py").write_text("def f(:\n")
        words, named = [*words, f"algorithm.plugins=[{tmp_path}/a.py]"], f"algorithm.plugins has '{tmp_path}/a.py'"
    else:
        (tmp_path / "rows.jsonl").unlink()
        named = f"{tmp_path}/rows.jsonl: no such file"
    before = {file: file.read_bytes() for file in (tmp_path / "runs").rglob("*") if file.is_file()}
    assert main(["evaluate", *words]) == 2
    said = capsys.readouterr().err
    faults = [line for line in said.splitlines() if line.startswith("error: ")]
    assert len(faults) == lines
    assert any(named in line for line in faults), said
    assert "Traceback" not in said
    assert all(file.read_bytes() == content for file, content in before.items())
