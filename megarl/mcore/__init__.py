"""Everything that uses Megatron-Core: process groups, models, training steps, optimizers, checkpoints.

It knows process groups, models, packed rows, pipeline schedules, optimizers and sharded checkpoints. It does not know
losses (they are passed in as functions of packed columns), tensor names of other libraries, servers or prompts.
`roles/` calls it on every rank.
"""

from megarl.mcore.cpu import import_megatron

import_megatron()
