"""Rewards that ask a service: a `judge` and a reward `model`, each through a `service` under a `limit`.

They wait and do not compute, so they run in the collector's event loop.  They are made from settings, not found by
their name.  Called by: the collector and the evaluation, through `megarl.trainer.collectors.make_rewards`.
"""
