"""Names of verl's configuration classes, for the annotations of a plug-in's functions."""

from megarl.algo.verl_compat.signatures import Config

ActorConfig = AlgoConfig = Config
