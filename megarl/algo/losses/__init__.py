"""Policy losses and the value loss: functions of packed [T] columns that return one number per token.

They do not aggregate: the weight of a token is data (aggregate.py).  They do not add entropy or KL: loss.py does this
in the same way for all.  The columns that a function gets hold 0 at masked places; its results there are ignored.

    f(log_probs, old_log_probs, advantages, mask, segment_ids, *, hyperparameters) -> (token loss [T], {statistic: [T]})

Its keyword-only arguments are its hyperparameters with their defaults: clip_low, clip_high and clip_c are set by
`actor.clip_ratio*`, all others by `algorithm.policy_loss_args`.  Two names are columns of the step instead of
hyperparameters: see registry.COLUMN_KEYWORDS.  To add a loss, put a function with `@register_policy_loss` in a file
here.
"""

from megarl.algo.registry import import_folder

import_folder(__name__, __path__)
