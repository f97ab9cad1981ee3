"""Every hyperparameter of a run: typed, checked before any process starts, and free of torch.

Knows: the keys (schema/), what each means (describe.py), the names a key may hold (names.py), the spellings of other
documents (aliases.py), which values are impossible (validate/), which layouts would be possible instead (suggest.py),
which keys would do nothing (unused_keys.py), on which GPUs actor and servers stand (placement.py), and how presets,
recipes, files and command line become one `Config` (compose.py) or, with several values of a key, one for each run of a
sweep (sweep.py).  Does not know: tensors, processes, files of data; those are checked where they are read.
Called by: the commands on the top floor, which hand plain values down; no lower room ever sees a `Config`.

    config, warnings = load_config(["recipe=quickstart", "actor.optim.lr=1e-4"])
"""

from megarl.config.compose import (
    config_dir,
    from_yaml,
    layout_names,
    layout_word,
    load_config,
    preset_names,
    recipe_names,
    to_yaml,
)
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
    "recipe_names",
    "resolved",
    "to_yaml",
    "used_roles",
]
