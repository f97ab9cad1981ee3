"""Draws `docs/images/system.svg`, the picture of the README: the processes of a run, and what travels between them."""

from __future__ import annotations

from html import escape

WIDTH, HEIGHT = 960, 400
FONT = "font-family='-apple-system,Segoe UI,Helvetica,Arial,sans-serif'"

# x, y, width, height, colour, title, lines
BOXES = (
    (20, 60, 180, 90, "#eef2f7", "Prompts", ("JSONL, parquet,", "Hugging Face datasets")),
    (280, 60, 240, 90, "#e7f4ea", "Collectors", ("groups of completions, agents,", "rewards with time limits")),
    (
        680,
        60,
        260,
        90,
        "#e8effc",
        "SGLang servers",
        ("generate; each token has its", "log-prob and its weight version"),
    ),
    (
        280,
        260,
        240,
        120,
        "#fdf3e1",
        "Driver: train.py",
        ("advantages, loss weights, ledger", "of prompts, checkpoints,", "restarts, metrics"),
    ),
    (
        680,
        260,
        260,
        120,
        "#fbe9ea",
        "Megatron-Core ranks",
        ("actor, critic, reference", "TP, PP, CP, EP, DP, FSDP, LoRA", "one shared loss layer"),
    ),
)
# x1, y1, x2, y2, the text's place, its lines
ARROWS = (
    (200, 105, 278, 105, (239, 95), ("read",)),
    (520, 95, 678, 95, (599, 85), ("requests, HTTP",)),
    (680, 120, 522, 120, (601, 140), ("tokens, log-probs",)),
    (370, 150, 370, 258, (360, 200), ("scored", "groups")),
    (520, 300, 678, 300, (599, 290), ("packed batch",)),
    (680, 340, 522, 340, (601, 360), ("statistics",)),
    (810, 260, 810, 152, (798, 195), ("new weights, shard to shard;", "all checksums compared")),
)


def system() -> str:
    """The text of the file."""
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {HEIGHT}' width='{WIDTH}' role='img' "
        "aria-label='The processes of a run of megarl'>",
        "<defs><marker id='head' viewBox='0 0 10 10' refX='9' refY='5' markerWidth='7' markerHeight='7' "
        "orient='auto'><path d='M0,0 L10,5 L0,10 z' fill='#48566a'/></marker></defs>",
        f"<rect width='{WIDTH}' height='{HEIGHT}' rx='12' fill='#ffffff'/>",
        _text(20, 34, "One step of a run: generate, score, learn, send the weights", size=17, weight=600),
    ]
    for x, y, width, height, colour, title, lines in BOXES:
        parts.append(
            f"<rect x='{x}' y='{y}' width='{width}' height='{height}' rx='10' fill='{colour}' stroke='#b6c0ce'/>"
        )
        parts.append(_text(x + width / 2, y + 30, title, size=16, weight=600, anchor="middle"))
        parts += [_text(x + width / 2, y + 54 + 20 * at, line, anchor="middle") for at, line in enumerate(lines)]
    for x1, y1, x2, y2, (x, y), words in ARROWS:
        parts.append(
            f"<path d='M{x1},{y1} L{x2},{y2}' stroke='#48566a' stroke-width='1.6' marker-end='url(#head)' fill='none'/>"
        )
        anchor = "middle" if y1 == y2 else "end"
        parts += [_text(x, y + 18 * at, line, size=12.5, anchor=anchor) for at, line in enumerate(words)]
    return "\n".join([*parts, "</svg>", ""])


def _text(x: float, y: float, words: str, *, size: float = 13.5, weight: int = 400, anchor: str = "start") -> str:
    style = f"font-size='{size}' font-weight='{weight}' text-anchor='{anchor}' fill='#1c2530'"
    return f"<text x='{x:g}' y='{y:g}' {FONT} {style}>{escape(words)}</text>"
