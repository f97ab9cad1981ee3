"""The one exception of this room."""


class ConfigError(ValueError):
    """A setting that cannot be: one sentence with the key, the value and what is wanted.

    Example: "actor.clip_ratio=3.0: want a number between 0 and 1, both excluded".
    """
