"""What makes the model of an example before its run."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl import train
from megarl.config import Config, load_config
from megarl.config.schema.teachers import Teacher, TeacherModel
from megarl.trainer.recipes.cold_start import cold_start


def of_file(text: str) -> Config:
    """A run whose trainer.prepare is a file."""
    Path("make.py").write_text(text)
    config = Config()
    config.trainer.prepare, config.model.path = "make.py", "model"
    return config


def test_a_file_makes_the_model_folder_once() -> None:
    config = of_file(
        "from pathlib import Path\n"
        "def prepare(config):\n"
        "    Path(config.model.path).mkdir()\n"
        "    (Path(config.model.path) / 'config.json').touch()\n"
    )
    for _ in range(2):
        train.prepare(config)
    assert Path("model/config.json").exists()


def test_a_file_without_prepare_is_refused() -> None:
    config = of_file("def other(config): ...")
    with pytest.raises(
        ValueError, match=r"^trainer\.prepare=make\.py: make\.py has no function 'prepare'; it has other"
    ):
        train.prepare(config)


def test_a_missing_teacher_is_made_beside_a_policy_that_is_there() -> None:
    config = of_file(
        "from pathlib import Path\n"
        "def prepare(config):\n"
        "    for path in (config.model.path, config.teachers['a'].model.path):\n"
        "        Path(path).mkdir(exist_ok=True)\n"
        "        (Path(path) / 'config.json').touch()\n"
    )
    config.teachers["a"] = Teacher(model=TeacherModel("taught"))
    Path("model").mkdir()
    Path("model/config.json").touch()
    train.prepare(config)
    assert Path("taught/config.json").exists()


def test_another_model_than_that_of_the_cold_start_is_refused_before_anything_is_written() -> None:
    config, _ = load_config(["recipe=quickstart", "model.path=runs/elsewhere/hf"])
    written: list[Path] = []
    with pytest.raises(ValueError, match=r"^model\.path=runs/elsewhere/hf: .* own is runs/quickstart_sft/hf"):
        cold_start(config, ["recipe=quickstart_sft"], write_data=written.append, model={})
    config, _ = load_config(["recipe=quickstart_distill", "teachers.sums.model.path=elsewhere"])
    with pytest.raises(
        ValueError, match=r"^teachers\.sums\.model\.path=elsewhere: .* own is runs/quickstart_teacher_sft/hf"
    ):
        cold_start(config, ["recipe=quickstart_teacher_sft"], write_data=written.append, model={}, role="teachers.sums")
    assert not written
