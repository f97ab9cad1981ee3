"""Makes what recipe=gsm8k_qwen2_5_0_5b_1gpu reads, without a download: questions in GSM8K's form, and a random Qwen2.

    python launch/gsm8k_shaped.py FOLDER --hidden 896 --layers 24 --heads 14 --ffn 4864

writes FOLDER/train.jsonl, FOLDER/test.jsonl and FOLDER/model.  A folder that is complete stays as it is.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from megarl.data.examples.sizes import TinySizes
from megarl.data.examples.tiny import write_tiny_model

NUM_TRAIN, NUM_TEST = 256, 16
ASK = 'Let\'s think step by step and output the final answer after "####".'  # as the published run asked


def write_rows(file: Path, first_numbers: range) -> None:
    """Rows of GSM8K's form whose answer is always 7: a random model says it now and then."""
    rows = [
        {
            "question": f"Ann has {a} pens and gets {7 - a} more. How many pens has she? {ASK}",
            "answer": f"She has {a} + {7 - a} = <<{a}+{7 - a}=7>>7 pens.\n#### 7",
        }
        for a in first_numbers
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--hidden", type=int, default=32, help="a multiple of --heads")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=4, help="even; keys and values have two")
    parser.add_argument("--ffn", type=int, default=64)
    options = parser.parse_args(argv)
    if options.hidden % options.heads or options.heads % 2:
        parser.error(
            f"--hidden {options.hidden}, --heads {options.heads}: expected a multiple of the heads, an even number"
        )
    options.folder.mkdir(parents=True, exist_ok=True)
    write_rows(options.folder / "train.jsonl", range(1, 1 + NUM_TRAIN))
    write_rows(options.folder / "test.jsonl", range(-NUM_TEST, 0))
    if not (options.folder / "model" / "config.json").exists():
        sizes = TinySizes(
            hidden=options.hidden,
            layers=options.layers,
            heads=options.heads,
            kv_heads=2,
            head_dim=options.hidden // options.heads,
            ffn=options.ffn,
        )
        write_tiny_model(options.folder / "model", sizes, family="qwen2", dtype="bfloat16")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
