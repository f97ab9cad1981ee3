"""What an evaluation says, beside its mean reward.

`evaluation`: statistics of the replies to a prompt, of sets of prompts. `audit`: whether a held-out reward parts from
the trained one.
"""
