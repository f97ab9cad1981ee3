"""What the files of configs/model hold, for the tests of this room."""

from dataclasses import dataclass
from functools import cache
from typing import Any

from omegaconf import OmegaConf

from megarl.arch.hf_config import completed
from megarl.arch.layout import KEYS, Layout
from megarl.config import config_dir

NAMES = sorted(path.stem for path in (config_dir() / "model").glob("*.yaml"))
MINIS = [name for name in NAMES if name.endswith("_mini")]
PUBLISHED = [name for name in NAMES if name not in MINIS]


@dataclass(frozen=True)
class Case:
    """One layout of a preset."""

    preset: str
    name: str  # 64x80
    content: dict[str, Any]

    @property
    def layout(self) -> Layout:
        megatron = self.content.get("actor", {}).get("megatron", {})
        return Layout(**{field: megatron[key] for field, key in KEYS.items() if key in megatron})

    @property
    def num_ranks(self) -> int:
        trainer = self.content["trainer"]
        return trainer["nnodes"] * trainer["n_gpus_per_node"]

    @property
    def recomputes(self) -> bool:
        return self.content.get("actor", {}).get("megatron", {}).get("recompute_granularity") == "full"

    @property
    def words(self) -> list[str]:
        return [f"model={self.preset}", f"layout={self.name}"]


@cache
def content_of(preset: str) -> dict[str, Any]:
    return OmegaConf.to_container(OmegaConf.load(config_dir() / "model" / f"{preset}.yaml"))


def hf_of(preset: str) -> dict[str, Any]:
    """As the config.json with these numbers is read."""
    return completed(content_of(preset)["model"]["config"])


def cases_of(preset: str) -> list[Case]:
    return [Case(preset, str(name), content) for name, content in content_of(preset)["layouts"].items()]


def distinct_layouts(preset: str) -> list[Layout]:
    """Layouts whose ranks may hold different numbers of parameters: what is not cut by is left out."""
    seen = {}
    for case in cases_of(preset):
        values = {
            field: getattr(case.layout, field) for field in KEYS if field not in ("cp", "use_distributed_optimizer")
        }
        seen[tuple(values.items())] = Layout(**values)
    return list(seen.values())
