"""Agents: programs that talk to the model, and the record of what they said to each other as token ids.

`conversation`: a tree of turns; what of it becomes rows to learn.
Nothing here depends on Megatron, losses, or the source of the weights.
"""
