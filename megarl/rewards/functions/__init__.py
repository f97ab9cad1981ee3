"""Built-in rewards: functions with `@register_reward`, one subject a file.  `auto` chooses among them by data source.

They compute; none waits for a service.  Called by: a reward process, by the address in `megarl.rewards.REWARDS`.
"""
