"""Whose folders a run takes: those that only its user and root can change.  The others here are real users."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from config_helpers import BASE
from sandbox_modes import NOBODY, as_user

from megarl.cli import main
from megarl.io.own_folders import check_own

ME, OTHER = NOBODY, NOBODY + 1


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder like /tmp: all may write, and nobody may delete what is another's."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    folder.chmod(0o1777)
    yield folder
    shutil.rmtree(folder)


def made(place: Path, owner: int, mode: int = 0o700, group: int | None = None) -> Path:
    place.mkdir(parents=True)
    os.chown(place, owner, owner if group is None else group)
    place.chmod(mode)
    return place


def linked(place: Path, owner: int, target: Path) -> Path:
    place.symlink_to(target)
    os.lchown(place, owner, owner)
    return place


def said(folder: Path, *, contents: bool = False) -> str:
    """The sentence with which ME refuses a folder; empty if there is none."""

    def check() -> str:
        try:
            check_own(folder, "key", contents=contents)
        except ValueError as error:
            return str(error)
        return ""

    return str(as_user(ME, check))


def test_a_folder_of_ones_own_is_taken(shared: Path) -> None:
    mine = made(shared / "mine", ME, 0o755)
    for folder in (mine, mine / "not/there", shared / "new", Path("/usr"), linked(shared / "link", ME, mine)):
        assert not said(folder), folder
    made(mine / "below", 0)
    assert not said(mine, contents=True)


def test_a_user_without_a_home_has_own_folders_too(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME")
    assert not said(made(shared / "mine", ME))


FOREIGN: dict[str, Callable[[Path], tuple[Path, Path]]] = {  # -> the folder, and what is wrong on the way to it
    "of_another": lambda at: (found := made(at / "run", OTHER), found),
    "open_to_all": lambda at: (found := made(at / "run", ME, 0o777), found),
    "open_to_all_but_sticky": lambda at: (found := made(at / "run", ME, 0o1777), found),
    "open_to_a_group": lambda at: (found := made(at / "run", ME, 0o770), found),
    "below_that_of_another": lambda at: (made((found := made(at / "a", OTHER, 0o755)) / "run", ME), found),
    "below_an_open_one": lambda at: (made((found := made(at / "a", ME, 0o777)) / "run", ME), found),
    "to_be_made_in_an_open_one": lambda at: ((found := made(at / "a", ME, 0o777)) / "run", found),
    "link_to_that_of_another": lambda at: (linked(at / "run", ME, found := made(at / "a", OTHER)), found),
    "link_of_another": lambda at: (found := linked(at / "run", OTHER, made(at / "a", ME)), found),
    "below_a_link_of_another": lambda at: ((found := linked(at / "b", OTHER, made(at / "a", ME))) / "run", found),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_foreign_folder_is_one_sentence(shared: Path, kind: str) -> None:
    folder, wrong = FOREIGN[kind](shared)
    is_of_another = wrong.lstat().st_uid == OTHER
    sentence = said(folder)
    assert sentence.startswith(f"key: others can change {folder}, as {wrong} has mode "), sentence
    assert f"and belongs to user {OTHER if is_of_another else ME} and group " in sentence


def test_a_foreign_folder_or_file_inside_is_found(shared: Path) -> None:
    mine = made(shared / "mine", ME)
    file = made(mine / "actor", ME) / "rank_00000.json"
    file.touch()
    os.chown(file, OTHER, OTHER)
    assert not said(mine)
    assert f"as {file} has mode 0644 and belongs to user {OTHER}" in said(mine, contents=True)


def test_the_group_of_a_single_user_is_that_user(tmp_path: Path) -> None:
    """As root, whose group has its name and no other member."""
    check_own(made(tmp_path / "run", 0, 0o775), "key")
    others = made(tmp_path / "other", 0, 0o775, group=4242)  # a group without a name
    with pytest.raises(ValueError, match="mode 0775 and belongs to user 0 and group 4242; expected `chmod go-w`, "):
        check_own(others, "key")


@pytest.mark.parametrize("command", ["train", "sft", "evaluate", "node"])
def test_a_run_in_a_foreign_folder_is_refused_unless_its_key_says_so(
    command: str, shared: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, key = made(shared / "run", OTHER, 0o755), "trainer.trust_shared_folders"
    rows = {"sft": "sft.train_files=[a.jsonl]", "evaluate": "data.val_files=[a.jsonl]"}.get(command, BASE[0])
    words = [rows, *BASE[1:], f"trainer.default_local_dir={shared}"]
    words = [command, *words, "trainer.experiment_name=run", "trainer.check_only=true", "trainer.device=cpu"]
    assert main(words) == 2
    (sentence,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert sentence == (
        f"error: trainer.default_local_dir, trainer.experiment_name: others can change {run}, as {run} has mode 0755 "
        f"and belongs to user {OTHER} and group {OTHER}; expected `chmod go-w`, a folder of this user's own, or "
        f"{key}=true where all are trusted"
    )
    assert "others can change" not in (main([*words, f"{key}=true"]), capsys.readouterr().err)[1]
