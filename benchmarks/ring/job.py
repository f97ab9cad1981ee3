"""From the words of a run to the same run with random weights and prompts made here, and the commands that start it."""

from __future__ import annotations

import os
import re
import shlex
import socket
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.ring.model import write_model, write_prompts
from megarl.arch.gpus import GPUS, Gpu, find, of_memory
from megarl.config import Config, layout_word, load_config, model_config, used_roles
from megarl.trainer.recipes.quickstart import MODEL

HERE = Path(__file__).parent
DEFAULT = "recipe=quickstart"
COLD_START = Path("runs/quickstart_sft/hf")  # its model
USUAL = {"steps": 5, "warmup": 1, "work": Path("runs/bench_ring")}  # of the options
FOLDERS = {"actor": "model", "critic": "critic", "ref": "ref"}


@dataclass(frozen=True)
class Ring:
    """Example: ring = make_ring(["recipe=quickstart"], options); ring.write(); then `megarl train *ring.words`."""

    name: str
    typed: tuple[str, ...]  # the user's words, but for the recipe
    recipe: str | None
    given: Config  # what these words come to
    folder: Path  # of all that is made for the run
    options: Namespace

    @property
    def file(self) -> Path:
        return self.folder / "ring.yaml"

    @property
    def words(self) -> list[str]:
        """For `megarl train`; each machine has the file under the same path."""
        return [f"recipe={self.file}", *self.typed]

    @property
    def has_weights(self) -> bool:
        return self.given.rollout.engine == "hf"

    @property
    def is_quickstart(self) -> bool:
        """Its model may be there, or not yet be made: here it is always the same."""
        return Path(self.given.model.path) == COLD_START

    @property
    def num_steps(self) -> int:
        return self.options.warmup + self.options.steps

    @property
    def metrics(self) -> Path:
        return self.folder / "run" / "metrics.jsonl"

    def numbers(self, role: str) -> dict[str, Any]:
        """config.json of a role's model: of its preset or folder; the quickstart's makes its own."""
        found = {key: value for key, value in model_config(self.given, role).items() if value is not None}
        return found if found and not self.is_quickstart else quickstart_numbers()

    def write_settings(self) -> Config:
        """The file, and the run that it comes to."""
        self.folder.mkdir(parents=True, exist_ok=True)
        whole = self.file.with_suffix(f".{socket.gethostname()}.{os.getpid()}")  # every machine writes the same
        whole.write_text(yaml.safe_dump(self._settings(), sort_keys=False))
        whole.replace(self.file)
        return load_config(self.words)[0]

    def write(self) -> Config:
        """All that the run reads."""
        data, options, written = self.given.data, self.options, set()
        for role in used_roles(self.given, "train"):
            if (folder := self._model_folder(role)) in written:
                continue
            hf = self.numbers(role)
            write_model(
                folder,
                hf,
                dtype=self.given.model.dtype,
                weights=self.has_weights,
                response_tokens=options.response_tokens,
                seed=self.given.trainer.seed,
            )
            written.add(folder)
        count = data.train_batch_size * (self.num_steps + 1 + self.given.rollout.ahead)
        vocab = self.numbers("actor")["vocab_size"]
        longest = data.max_prompt_length
        write_prompts(self.folder / "prompts.jsonl", count, mean=self.prompt_tokens, longest=longest, vocab_size=vocab)
        return self.write_settings()

    @property
    def prompt_tokens(self) -> float:
        longest, given = self.given.data.max_prompt_length, self.options.prompt_tokens
        if given is not None and not 1 <= given <= longest:
            raise ValueError(f"--prompt-tokens {given}: expected 1 to data.max_prompt_length={longest}")
        return given or min(longest, max(6.0, longest / 4))  # the quickstart's sums have 6

    def node_commands(self) -> list[str]:
        """What is typed on each machine."""
        trainer, script = self.given.trainer, "python benchmarks/ring/bench_ring.py"
        words = self._shell_words()
        names = ("prompt_tokens", "response_tokens", "steps", "warmup", "work")
        given = {name: getattr(self.options, name) for name in names}
        told = [f" --{name.replace('_', '-')} {value}" for name, value in given.items() if value != USUAL.get(name)]
        start = f"{script}{''.join(told)} {words}"
        if trainer.nnodes == 1:
            return [start]
        where = "trainer.master_addr=NODE_0"
        return [f"{start} trainer.node_rank={node} {where}" for node in range(trainer.nnodes)]

    def slurm_command(self) -> str:
        """The same under Slurm, which tells each machine its number."""
        nodes, gpus = self.given.trainer.nnodes, self.given.trainer.n_gpus_per_node
        one = self.node_commands()[0].partition(" trainer.node_rank=")[0]
        return f"srun --nodes={nodes} --ntasks-per-node=1 --gpus-per-node={gpus} {one}"

    def launch_command(self) -> str:
        """The user's own run, with the script that starts it on several machines."""
        words = self._shell_words()
        nodes = self.given.trainer.nnodes
        return f"bash launch/local.sh {words}" if nodes == 1 else f"bash launch/node.sh {nodes} NODE NODE_0 {words}"

    def _shell_words(self) -> str:
        return " ".join(
            shlex.quote(word) for word in [*([f"recipe={self.recipe}"] if self.recipe else []), *self.typed]
        )

    def _model_folder(self, role: str) -> Path:
        """Roles that start from the same numbers share one."""
        same = self.numbers(role) == self.numbers("actor")
        return self.folder / FOLDERS["actor" if same else role]

    def _settings(self) -> dict[str, Any]:
        """What lies over the recipe; what was typed lies over this."""
        rollout, folder = self.given.rollout, self.folder
        paths = {role: str(self._model_folder(role)) for role in used_roles(self.given, "train")}
        loads = [] if self.has_weights else ["--load-format", "dummy"]
        settings: dict[str, Any] = {
            "model": {"path": paths["actor"], "tokenizer_path": paths["actor"]},
            **{role: {"model": {"path": path}} for role, path in paths.items() if role != "actor"},
            "data": {"train_files": [str(folder / "prompts.jsonl")], "val_files": []},
            "reward": {"fn": f"{HERE / 'reward.py'}:score", "num_workers": self.given.reward.num_workers},
            "rollout": {"check_every": 0, "sglang": {"args": [*rollout.sglang.args, *loads]}},
            "trainer": {
                "default_local_dir": str(folder),
                "experiment_name": "run",
                "total_training_steps": self.num_steps + 1,  # in the last one it is asked to end
                "critic_warmup": 0,
                "val_before_train": False,
                "test_freq": -1,
                "save_freq": -1,
                "check_export": False,
                "resume_mode": "disable",
                "logger": ["jsonl"],
                "prepare": None,
            },
        }
        if self.options.device == "cuda":  # also of a recipe that is for CPUs
            settings["trainer"]["device"] = "cuda"
        return ({"recipe": self.recipe} if self.recipe else {}) | settings


def make_ring(words: list[str], options: Namespace, name: str | None = None) -> Ring:
    """`name` of its folder and its page.  ValueError for words that no run has."""
    if not any(word.startswith(("recipe=", "model=")) for word in words):
        words = [DEFAULT, *words]
    given, _ = load_config(words)
    recipe = next((word.partition("=")[2] for word in words if word.startswith("recipe=")), None)
    if recipe is not None and recipe.endswith((".yaml", ".yml")):
        recipe = str(Path(recipe).resolve())
    typed = tuple(word for word in words if not word.startswith("recipe="))
    told = recipe or next(word.partition("=")[2] for word in words if word.startswith("model="))
    name = name or Path(told).stem
    return Ring(name, typed, recipe, given, (options.work / name).resolve(), options)


def quickstart_numbers() -> dict[str, Any]:
    """The config.json of the quickstart's model, which that makes by itself."""
    return {
        "model_type": "qwen3",
        "vocab_size": 128,  # its characters, up to a number that no server pads
        "hidden_size": MODEL.hidden,
        "intermediate_size": MODEL.ffn,
        "num_hidden_layers": MODEL.layers,
        "num_attention_heads": MODEL.heads,
        "num_key_value_heads": MODEL.kv_heads,
        "head_dim": MODEL.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
    }


def gpu_of(name: str | None, ring: Ring) -> Gpu:
    """The GPU that is named, or that the name of the run's layout means.  ValueError where nothing says it."""
    if name is not None:
        return find(name)
    words = [*([f"recipe={ring.recipe}"] if ring.recipe else []), *ring.typed]
    if found := re.fullmatch(r"\d+x(\d+)", layout_word(words) or ""):
        return of_memory(int(found[1]))
    raise ValueError(f"--gpu is missing, and no layout says it; expected one of {', '.join(GPUS)}")
