"""Folders of runs as `megarl report` reads them, with text that would like to be HTML."""

import json
import math
from pathlib import Path
from typing import Any

from megarl.config import Config, resolved, to_yaml
from megarl.metrics.reading.jsonl import append_lines

HOSTILE = "</script><script>window.struck = 1</script><img src=x onerror='window.struck = 2'>"

MESSAGES = [
    {"role": "user", "text": f"12+34? {HOSTILE}"},
    {
        "role": "assistant",
        "text": "",
        "reasoning": "a tool",
        "calls": [{"name": "add", "arguments": f"[12, 34] {HOSTILE}"}],
    },
    {"role": "tool", "text": f"46 {HOSTILE}"},
    {"role": "assistant", "text": "It is 46."},
]


def run_folder(folder: Path, *, steps: int = 40, name: str = "try", lr: float = 1e-6) -> Path:
    """A run of so many steps with every file that a page shows, but the summary; all its last answers are right."""
    folder.mkdir(parents=True)
    config = Config()
    config.trainer.experiment_name, config.actor.optim.lr, config.model.path = name, lr, HOSTILE
    (folder / "config.yaml").write_text(to_yaml(resolved(config)))
    append_lines(folder / "metrics.jsonl", [_metrics(step, steps) for step in range(1, steps + 1)])
    append_lines(folder / "metrics.jsonl", [_evaluation(step) for step in (0, steps)])
    samples = [sample(step, at) for step in range(1, steps) for at in range(4)]
    samples += [sample(steps, at, reward=1.0) for at in range(4)]
    samples += [sample(step, 4, completion="all rows", messages=MESSAGES) for step in range(1, steps + 1)]
    (folder / "code.json").write_text(json.dumps({"reward.py": f"# {lr}\nRIGHT = '{HOSTILE}'\n"}))
    append_lines(folder / "samples.jsonl", samples)
    append_lines(folder / "advice.jsonl", [{"step": 7, "advice": f"entropy: {HOSTILE}"}])
    append_lines(folder / "tokens.jsonl", [_tokens(step) for step in range(1, steps + 1)])
    append_lines(folder / "timeline.jsonl", [_timeline(step) for step in range(1, steps + 1)])
    row = {"step": 4, "bad_step": 6, "what": "the loss is NaN", "skipped": [1]}
    append_lines(folder / "rollbacks.jsonl", [row])
    return folder


def sample(step: int, at: int, **other: Any) -> dict[str, Any]:
    return {
        "step": step,
        "uid": f"{step}-{at // 2}",
        "prompt": "12+34=",
        "completion": f"46 {HOSTILE}",
        "ground_truth": "46",
        "reward": float(at % 2),
        "reward_extra": {"len": 3.0},
        "finish_reason": "stop",
        "versions": [[step - 1, 0, 3]],
        "num_tokens": 3,
        "num_turns": 1,
        "num_rows": 1,
        "turn_rewards": [],
    } | other


def _tokens(step: int) -> dict[str, Any]:
    """A question, two tokens of the policy, what a tool said, one more token of newer weights."""
    first = {"version": step - 1, "pieces": ["46", HOSTILE], "rollout_log_probs": [-1.0, -0.5]}
    first |= {"log_probs": [-1.0, -0.5 + math.log(2)], "advantages": [0.5, -2.0]}
    second = {"version": step, "pieces": ["."], "rollout_log_probs": [-0.1], "log_probs": [-0.1], "advantages": [1.0]}
    parts = [{"text": "12+34="}, first, {"text": f"tool: {HOSTILE}"}, second]
    return {"step": step, "uid": "0-1", "reward": 1.0, "rows": [parts]}


def _timeline(step: int) -> dict[str, Any]:
    stages = [["gen", 0.0, 0.5, 0], ["pass", 0.6, 0.3, 1], ["update_actor", 0.5, 1.0, 0]]
    return {"step": step, "stages": stages, "calls": [["ranks_0", "update actor", 0.6, {"0": 0.75, "1": 0.5}]]}


def _evaluation(step: int) -> dict[str, Any]:
    return {"step": step, "time": 1000.0 + 2 * step, "kind": "evaluation", "val/score": 0.0}


def _metrics(step: int, steps: int) -> dict[str, Any]:
    """The second of six stages is the longest; a reward has a name that no page may read as HTML."""
    return {
        "step": step,
        "time": 1000.0 + 2 * step,
        "kind": "train",
        "critic/score/mean": step / steps,
        "actor/pg_loss": 0.5 - step / (2 * steps),
        "actor/lr": 1e-6,
        "actor/entropy": float("nan") if step == 3 else 1 / step,
        "response_length/mean": 3.0,
        "rollout_corr/log_prob_gap_max": 1e-6 * step,
        "reward/<b onmouseover=1>": 1.0,
        "timing_s/gen": 0.5,
        "timing_s/update_actor": 1.0,
        "timing_s/push/send": 0.1,
        "timing_s/step": 2.0,
        "perf/unaccounted": 0.25,
        "perf/throughput": 100.0,
    }
