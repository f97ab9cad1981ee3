"""GRPO as a plain loop of transformers and torch: generate, score, forward and backward, AdamW.

Run by bench_pretrained.py in the folder of the project, whose rows, model and reward it takes; writes plain.json: for
each step the seconds of rollout, update and both, and the mean score.  Settings are those of train.yaml.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

PROMPTS, ANSWERS, TOKENS, LR, MICRO = 8, 8, 16, 3e-5, 32


def main(steps: int) -> None:
    sys.path.insert(0, "")
    from reward import score  # of the project

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained("data/model", padding_side="left")
    model: Any = AutoModelForCausalLM.from_pretrained("data/model", dtype=torch.float32, attn_implementation="sdpa")
    optimizer = torch.optim.AdamW(model.parameters(), LR, (0.9, 0.99), weight_decay=0.0, fused=True)
    rows = [json.loads(line) for line in Path("data/train.jsonl").read_text().splitlines()]
    said = []
    for step in range(steps):
        asked = [row for row in rows[step * PROMPTS : (step + 1) * PROMPTS] for _ in range(ANSWERS)]
        begun = time.perf_counter()
        given: Any = tokenizer.apply_chat_template(
            [row["messages"] for row in asked],
            add_generation_prompt=True,
            padding=True,
            return_tensors="pt",
            return_dict=True,
        )
        width = given["input_ids"].shape[1]
        sampling = {"do_sample": True, "top_k": 0, "top_p": 1.0, "temperature": 1.0, "max_new_tokens": TOKENS}
        with torch.inference_mode():
            ids = model.generate(**given, **sampling)
        ids = ids.clone()  # else autograd refuses it
        texts = tokenizer.batch_decode(ids[:, width:], skip_special_tokens=True)
        scores = torch.tensor([score(text, row["ground_truth"]) for text, row in zip(texts, asked, strict=True)])
        generated = time.perf_counter()
        groups = scores.view(PROMPTS, ANSWERS)
        advantages = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-6)).view(-1, 1)
        _update(model, optimizer, ids, given["attention_mask"], advantages, tokenizer.eos_token_id)
        done = time.perf_counter()
        seconds = {"rollout": generated - begun, "update": done - generated, "step": done - begun}
        said.append(seconds | {"score": scores.mean().item()})
        print(said[-1], flush=True)
    Path("plain.json").write_text(json.dumps(said))


def _update(
    model: Any,
    optimizer: torch.optim.Optimizer,
    ids: torch.Tensor,
    mask: torch.Tensor,
    advantages: torch.Tensor,
    end: int,
) -> None:
    """One step of the optimizer on all answers, a mean over their tokens; what follows an answer's end is left out."""
    answers = ids[:, mask.shape[1] :]
    is_end = answers == end
    real = is_end.cumsum(1) - is_end.long() == 0
    whole = torch.cat([mask, real.long()], 1)
    positions = (whole.cumsum(1) - 1).clamp(min=0)
    for part in torch.arange(len(ids)).split(MICRO):
        logits = model(
            input_ids=ids[part],
            attention_mask=whole[part],
            position_ids=positions[part],
            logits_to_keep=answers.shape[1] + 1,
        ).logits[:, :-1]
        log_probs = torch.log_softmax(logits, -1).gather(2, answers[part, :, None])[..., 0]
        ratio = torch.exp(log_probs - log_probs.detach())
        (-(ratio * advantages[part] * real[part]).sum() / real.sum()).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


if __name__ == "__main__":
    main(int(sys.argv[1]))
