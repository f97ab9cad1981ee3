"""Data: prompts and examples from files, ragged batches, and their packing into micro-batches.

`readers`, `fields`: files and rows. `order`: the data order and its saved position. `chat`: tokenizers and chat
templates. `template`: what follows an answer in a conversation.
`prompts`: prompts for RL. `sft`: examples for supervised fine-tuning. `batch`: the ragged `Batch`. `packing`:
distributes sequences over ranks and micro-batches. `examples/`: tasks and tiny models for tests and the quickstart.
Nothing here depends on engines, Megatron, losses or rewards.
Called by: the driver (prompts, batch), the roles (packing), the SFT stage (sft).
"""
