"""What `megarl evaluate` leaves behind: a folder of its own, and which weights its numbers are of."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

from megarl.config import Config
from megarl.durable_files import THREADS, WEIGHTS, facts_of
from megarl.trainer.build import model_folder

HOME = "evaluations"  # in the run's folder: 1, 2, ..., each of one `megarl evaluate`


def new_folder(run_dir: Path) -> Path:
    """The next free one, which is made: an earlier evaluation, or one that goes on beside this, keeps its own."""
    home = run_dir / HOME
    home.mkdir(parents=True, exist_ok=True)
    for number in count(1):
        try:
            (home / str(number)).mkdir()
        except FileExistsError:
            continue
        return home / str(number)
    raise AssertionError("there is always a next number")


def weights_of(config: Config) -> dict[str, Any]:
    """Of which weights an evaluation is: {"model", "folder", "sha256", "files": {name: {"bytes", "sha256"}}}.

    "sha256" is that of what `sha256sum` prints of the files.  Servers of rollout.urls loaded their weights before, from
    where is not known here: {"model", "servers": urls}.
    """
    if config.rollout.urls:
        return {"model": config.model.path, "servers": list(config.rollout.urls)}
    folder = Path(model_folder(config.model.path)).resolve()
    files = sorted(file for pattern in (WEIGHTS, f"{WEIGHTS}.index.json") for file in folder.glob(pattern))
    with ThreadPoolExecutor(THREADS) as threads:
        facts = dict(zip([file.name for file in files], threads.map(facts_of, files), strict=True))
    lines = "".join(f"{of['sha256']}  {name}\n" for name, of in sorted(facts.items()))
    whole = hashlib.sha256(lines.encode()).hexdigest()
    return {"model": config.model.path, "folder": str(folder), "sha256": whole, "files": facts}
