"""TRL's side of bench_pairs.py: runs in TRL's environment, knows nothing of megarl.

    python trl_pairs.py task.json

Writes into task.json's `folder` losses.json, {"dpo": the loss, ..., "versions": ...}, and the gradient of each loss as
NAME.safetensors.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer

PACKAGES = ("trl", "transformers", "accelerate", "datasets", "torch")  # all of peer.txt


def settings(task: dict[str, Any]) -> dict[str, Any]:
    """What both trainers are told: all pairs at once, in float32."""
    return {
        "output_dir": task["folder"],
        "use_cpu": True,
        "bf16": False,
        "per_device_train_batch_size": len(task["prompts"]),
        "gradient_checkpointing": False,
        "max_length": None,
        "report_to": "none",
    }


def dpo(task: dict[str, Any], tokenizer: Any, loss: dict[str, Any]) -> tuple[Any, torch.Tensor]:
    """The policy and its loss."""
    model, reference = (
        AutoModelForCausalLM.from_pretrained(task["models"][name], dtype=torch.float32)
        for name in ("actor", "reference")
    )
    trainer = DPOTrainer(
        model=model,
        ref_model=reference,
        args=DPOConfig(loss_type=loss["kind"], beta=loss["beta"], **settings(task)),
        train_dataset=Dataset.from_list([{"prompt": "1", "chosen": "2", "rejected": "3"}]),  # is not used
        processing_class=tokenizer,
    )
    columns = zip(task["prompts"], task["chosen"], task["rejected"], strict=True)
    rows = [dict(zip(("prompt_ids", "chosen_ids", "rejected_ids"), pair, strict=True)) for pair in columns]
    return model, trainer._compute_loss(model, trainer.data_collator(rows), False)


def rm(task: dict[str, Any], tokenizer: Any) -> tuple[Any, torch.Tensor]:
    """The reward model, with the head that the other side has, and its loss."""
    model = AutoModelForSequenceClassification.from_pretrained(
        task["models"]["actor"], dtype=torch.float32, num_labels=1, pad_token_id=tokenizer.pad_token_id
    )
    with torch.no_grad():
        head = model.score.weight
        head.copy_(torch.linspace(-0.5, 0.5, head.numel()).view_as(head))
    trainer = RewardTrainer(
        model=model,
        args=RewardConfig(disable_dropout=True, **settings(task)),
        train_dataset=Dataset.from_list([{"chosen": "12", "rejected": "13"}]),  # is not used
        processing_class=tokenizer,
    )
    columns = zip(task["prompts"], task["chosen"], task["rejected"], task["margins"], strict=True)
    rows = [{"chosen_ids": p + c, "rejected_ids": p + r, "margin": margin} for p, c, r, margin in columns]
    return model, trainer.compute_loss(model, trainer.data_collator(rows))


def main(path: str) -> None:
    task = json.loads(Path(path).read_text())
    tokenizer = AutoTokenizer.from_pretrained(task["tokenizer"])
    said: dict[str, Any] = {"versions": {name: importlib.metadata.version(name) for name in PACKAGES}}
    for name, loss in task["losses"].items():
        model, value = rm(task, tokenizer) if name == "rm" else dpo(task, tokenizer, loss)
        value.backward()
        said[name] = value.item()
        gradient = {n: param.grad for n, param in model.named_parameters() if param.grad is not None}
        save_file(gradient, Path(task["folder"], f"{name}.safetensors"))
    Path(task["folder"], "losses.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main(sys.argv[1])
