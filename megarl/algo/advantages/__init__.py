"""Advantage estimators, and the computation of advantages and returns once per batch, on whole samples.

An estimator is a function of packed columns, f(rewards [N], mask [N], segment_ids [N], *, ...), that returns
(advantages [N], returns [N]).  Its keyword-only arguments name its further inputs: any other column of the batch,
`group_ids` and other numbers per sequence [B], or a setting of estimate.py.  Masked tokens are not steps of the
decision process.  `advantages` is 0 at masked places.  To add an estimator, put a function with `@register_adv_est` in
a file here.
"""

from megarl.algo.registry import import_folder

import_folder(__name__, __path__)
