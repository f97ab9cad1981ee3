"""Every setting of a run: typed and checked before any process starts, without importing torch.

Contains the keys, each one record (schema/), their descriptions (describe.py), the names a key may hold (names.py), the
spellings of other documents (aliases.py, verl/), the checks of values and layouts (validate/), the conditions under
which keys act (effect.py), and the GPUs of actor and servers (placement.py).  compose.py merges presets, recipes, files
and command line into one `Config`; sweep.py makes one for each run of a sweep.  Tensors, processes and data files are
not known here; they are checked where they are read.
Called by the commands on the top floor, which pass plain values down; lower packages never see a `Config`.

    config, warnings = load_config(["recipe=quickstart", "actor.optim.lr=1e-4"])
"""

from megarl.config.compose import from_yaml, layout_word, load_config, read_yaml, to_yaml
from megarl.config.presets import config_dir, layout_names, preset_names, recipe_names
from megarl.config.resolve import layout_of, resolved
from megarl.config.schema import Config
from megarl.config.settings import ConfigError
from megarl.config.sweep import SweptRun, load_sweep
from megarl.config.validate.layouts import used_roles
from megarl.config.validate.models import model_config

__all__ = [
    "Config",
    "ConfigError",
    "SweptRun",
    "config_dir",
    "from_yaml",
    "layout_names",
    "layout_of",
    "layout_word",
    "load_config",
    "load_sweep",
    "model_config",
    "preset_names",
    "read_yaml",
    "recipe_names",
    "resolved",
    "to_yaml",
    "used_roles",
]
