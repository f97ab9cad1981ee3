"""Policy losses and the value loss: functions of packed [T] columns that return one number a token.

None of them aggregates: the weight of a token is data (aggregate.py).  None adds entropy or KL: loss.py does, the same
way for all.  A function gets columns whose masked places hold 0, and what it returns there is thrown away.

    f(log_probs, old_log_probs, advantages, mask, segment_ids, *, hyperparameters) -> (token loss [T], {statistic: [T]})

Its keyword-only arguments are its hyperparameters, whose defaults are its own: clip_low, clip_high and clip_c come from
`actor.clip_ratio*`, all others from `algorithm.policy_loss_args`.  Two names are no hyperparameters but columns of the
step: see registry.COLUMN_KEYWORDS.  A further loss is one function with `@register_policy_loss` in a file here.
"""

from megarl.algo.registry import import_folder

import_folder(__name__, __path__)
