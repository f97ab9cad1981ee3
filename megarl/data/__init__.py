"""What the model is asked, and how whole sequences become packed micro-batches.

Knows: files and rows (`readers`, `fields`), the order of visits and its saved position (`order`), tokenizers and chat
templates (`chat`), prompts for reinforcement learning (`prompts`), examples for supervised training (`sft`), the
ragged `Batch` (`batch`), the spread of sequences over ranks and micro-batches (`packing`); and two makers of things
to try the house with: a verifiable task (`arithmetic`) and a tiny model (`tiny`).
Does not know: engines, Megatron, losses, rewards.
Called by: the driver (prompts, batch), the roles (packing), the supervised stage (sft), the collector (prompts' nouns).
"""

from megarl.data.readers import read_dataset_folder, read_jsonl, read_parquet

# How a file is read, by the end of its name; a folder is what `datasets.save_to_disk` wrote.
FILE_KINDS = {".jsonl": read_jsonl, ".json": read_jsonl, ".parquet": read_parquet, "": read_dataset_folder}
