"""Two of verl's configuration classes: functions have them in annotations, and ask which of the two they got."""

from megarl.algo.documented.signatures import Config


class ActorConfig(Config):
    """What a policy loss gets as `config`: the clips of `actor` and algorithm.policy_loss_args."""


class AlgoConfig(Config):
    """What an advantage estimator gets as `config`: the settings of `algorithm`."""
