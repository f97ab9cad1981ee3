"""Which save a run resumes from, and that a damaged one is named and never used."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from config_helpers import load
from sandbox_modes import NOBODY
from saved_runs import Shard, flip, save, save_steps, saver_of

from megarl.config.schema import Trainer
from megarl.trainer.checkpoint.checkpoint import MANIFEST, Damaged, all_checkpoints, changes, find, to_resume
from megarl.trainer.checkpoint.resume import restore

KINDS = [
    MANIFEST,
    "actor/checkpoint.json",
    "actor/rank_00000.json",
    "actor/rank_00000.0000.safetensors",
    "rollouts/groups.jsonl",
    "rollouts/groups.safetensors",
]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    save_steps(tmp_path, 2, 4)
    return tmp_path


def damage(file: Path, how: str) -> str:
    """Returns the words that are expected after the file's name."""
    if how == "missing":
        file.unlink()
        return "is missing"
    content = file.read_bytes()
    changed = {"cut": content[: len(content) // 2], "emptied": b"", "longer": content + b"x"}.get(how)
    if changed is None:
        flip(file, len(content) // 2)
        return "is damaged"
    file.write_bytes(changed)
    return f"has {len(changed)} bytes, and {len(content)} were written" if file.name != MANIFEST else "is damaged"


def resumed(root: Path, mode: str = "auto", **more: Any) -> tuple[float, list[str]]:
    """What a run takes over from the save that it finds, and what it is told."""
    said: list[str] = []
    found = find(mode, root, said.append, verify=True, **more)
    assert found is not None
    actor = Shard()
    restore(found, {"actor": actor}, verify=True)
    assert (actor.tensor == actor.tensor[0]).all()
    return float(actor.tensor[0]), said


def test_a_foreign_folder_or_file_is_no_save_to_resume_from(root: Path, tmp_path: Path) -> None:
    """Where a run finds it, and where it is named; a project can say that all are trusted."""
    run, other = tmp_path / "runs/run", NOBODY
    save_steps(run / "checkpoints", 2, 4)
    file = run / "checkpoints/step_00000004/actor/rank_00000.json"
    (root / "step_00000002").chmod(0o777)
    os.chown(file, other, -1)
    where = Trainer(default_local_dir=str(run.parent))
    assert to_resume(replace(where, resume_mode="disable"), pytest.fail) is None
    for mode, wrong in (("auto", file), (str(root / "step_00000002"), root / "step_00000002")):
        named = replace(where, resume_mode=mode)
        with pytest.raises(
            ValueError, match=f"^trainer.resume_mode={mode}: others can change .*, as {wrong} has mode "
        ):
            to_resume(named, pytest.fail)
        assert to_resume(replace(named, trust_shared_folders=True), pytest.fail) is not None
    os.chown(file, os.geteuid(), -1)
    found = to_resume(where, pytest.fail)
    assert found is not None and found.step == 4


def test_resume_modes(root: Path, tmp_path: Path) -> None:
    assert find("auto", root / "nothing", pytest.fail, verify=True) is None
    assert find("disable", root, pytest.fail, verify=True) is None
    assert resumed(root) == (4.0, [])
    assert resumed(root, str(root / "step_00000002")) == (2.0, [])
    assert resumed(root, before=4) == (2.0, [])
    save_steps(tmp_path / "many", 7, 100_000_000)
    assert [c.step for c in all_checkpoints(tmp_path / "many")] == [7, 100_000_000], "steps are ordered as numbers"
    nothing = tmp_path / "nothing"
    nothing.mkdir()
    said = (
        rf"^trainer.resume_mode={nothing}: no finished checkpoint there \(no manifest.json\); expected auto, disable, "
    )
    with pytest.raises(ValueError, match=said):
        find(str(nothing), root, pytest.fail, verify=True)


def test_a_run_that_is_told_again_to_begin_at_a_save_goes_on_from_what_it_has_trained_since(
    root: Path, tmp_path: Path
) -> None:
    """As Slurm and Kubernetes tell it, which start the same command again; from a save of its own or of another run."""
    mode = str(root / "step_00000002")
    first = find(mode, root, pytest.fail, verify=True)
    assert first is not None
    for own in (root, tmp_path / "another" / "checkpoints"):
        save_steps(own, 3, 5, keep=1, origin=first.origin, first=2 if own == root else None)
        value, (sentence,) = resumed(own, mode)
        assert value == 5.0
        assert sentence.startswith(
            f"trainer.resume_mode={mode}: this run has gone on from there to step_00000005, so it"
        )
        again = find(mode, own, str, verify=True)
        assert again is not None
        assert again.origin == first.origin, "and so it does the next time"
        save(saver_of(own, {"actor": Shard(7)}, origin=again.origin), 7)
        assert resumed(own, mode)[0] == 7.0
        damage(own / "step_00000007" / MANIFEST, "cut")
        assert resumed(own, mode)[0] == 5.0
        assert resumed(own, mode, before=5)[0] == 2.0
    assert (root / "step_00000002").exists(), "the command names it as long as the run goes on"


def test_saves_that_do_not_come_from_the_one_that_is_asked_for_are_not_taken(root: Path) -> None:
    mode = str(root / "step_00000002")
    save_steps(root, 6)
    other = find(str(root / "step_00000004"), root, pytest.fail, verify=True)
    assert other is not None
    save_steps(root, 7, origin=other.origin)
    assert resumed(root, mode) == (2.0, [])


@pytest.mark.parametrize("how", ["flipped", "cut", "emptied", "longer", "missing"])
@pytest.mark.parametrize("name", KINDS)
def test_a_damaged_file_is_named_and_the_save_before_is_taken_or_the_folder_is_refused(
    root: Path, name: str, how: str
) -> None:
    folder = root / "step_00000004"
    words = damage(folder / name, how)
    if how == "flipped" and name.endswith("0000.safetensors"):  # which the ranks read
        found = find("auto", root, pytest.fail, verify=True)
        assert found is not None
        with pytest.raises(Damaged) as caught:
            restore(found, {"actor": Shard()}, verify=True)
        assert str(caught.value).startswith(f"{folder}/{name} {words}")
        assert resumed(root, before=found.step)[0] == 2.0
        return
    value, (sentence,) = resumed(root)
    assert value == 2.0
    assert sentence.startswith(f"step_00000004 is passed over: {folder}/{name} {words}")
    with pytest.raises(ValueError) as refused:
        find(str(folder), root, pytest.fail, verify=True)
    said = str(refused.value)
    assert said.startswith(f"trainer.resume_mode={folder}: ") and "\n" not in said
    assert (words if (name, how) != (MANIFEST, "missing") else f"no finished checkpoint there (no {MANIFEST})") in said


def test_any_bit_of_a_manifest_counts(root: Path) -> None:
    file = root / "step_00000004" / MANIFEST
    whole = file.read_bytes()
    for at in range(0, len(whole), 3):  # every third byte is tried, and each bit of such
        flip(file, at, at % 8)
        found = find("auto", root, str, verify=False)
        assert found is not None
        assert found.step == 2, f"bit {at % 8} of byte {at}"
        file.write_bytes(whole)
    damage(file, "cut")
    save_steps(root, 6)
    assert sorted(path.name for path in root.iterdir()) == ["step_00000002", "step_00000006"], "it blocks no save"


def test_without_verification_sizes_are_checked_and_bits_are_not(root: Path) -> None:
    (file,) = (root / "step_00000004").rglob("rank*.safetensors")
    size = file.stat().st_size
    flip(file, size - 1, 6)
    found = find("auto", root, pytest.fail, verify=False)
    assert found is not None
    actor = Shard()
    restore(found, {"actor": actor}, verify=False)
    assert not torch.equal(actor.tensor, Shard(4.0).tensor), "why verification is the default"
    file.write_bytes(file.read_bytes()[:-1])
    assert resumed(root) == (
        2.0,
        [f"step_00000004 is passed over: {file} has {size - 1} bytes, and {size} were written"],
    )


def test_a_run_without_any_whole_save_does_not_begin_again_by_itself(root: Path) -> None:
    for step in (2, 4):
        (root / f"step_0000000{step}" / "actor" / "rank_00000.json").unlink()
    said: list[str] = []
    with pytest.raises(ValueError) as caught:
        find("auto", root, said.append, verify=True)
    assert str(caught.value) == (
        f"trainer.resume_mode=auto: no checkpoint under {root} is whole "
        f"({root}/step_00000002/actor/rank_00000.json is missing); expected one, or "
        "trainer.resume_mode=disable, which begins again"
    )
    assert [sentence.split()[0] for sentence in said] == ["step_00000004", "step_00000002"]


def test_other_roles_are_refused_before_any_is_restored(tmp_path: Path) -> None:
    made = save(saver_of(tmp_path, {"actor": Shard(1), "critic": Shard(2)}), 2)
    assert made is not None
    actor = Shard(9)
    with pytest.raises(ValueError) as caught:
        restore(made, {"actor": actor}, verify=True)
    assert str(caught.value) == (
        f"trainer.resume_mode: {made.folder} holds actor, critic, this run trains actor; "
        "expected the same roles, or trainer.resume_mode=disable"
    )
    assert torch.equal(actor.tensor, Shard(9).tensor)


def test_what_concerns_only_saves_or_says_where_machines_are_is_no_change_of_a_run() -> None:
    saves = [
        "trainer.save_freq=2",
        "trainer.failed_saves=5",
        "trainer.keep_every_steps=4",
        "trainer.verify_resume=false",
    ]
    there = ["trainer.master_addr=10.0.0.9", "trainer.master_port=29600"]
    assert changes(load("trainer.nnodes=2", saves[0]), load("trainer.nnodes=2", *there, *saves)) == []
