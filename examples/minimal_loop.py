"""The whole ring in one process, to be read from top to bottom: rollout, reward, advantages, step, weights, again.

    python examples/minimal_loop.py        # about a minute on two cores

A tiny Qwen3 with random weights learns to name the larger of two digits ("3,8=" -> "8").  Nothing is shown to it
before: the reward alone says what a good answer is.  `megarl train` runs the same functions in processes of their own,
over many ranks and servers, with checkpoints, evaluation and recovery; here they stand in the order of a step.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from megarl.algo.advantages.estimate import estimate
from megarl.algo.loss import ActorLoss
from megarl.algo.step_columns import step_columns
from megarl.arch.hf_config import read_hf_config
from megarl.arch.layout import Layout
from megarl.data.batch import make_batch
from megarl.data.chat import encode, load_tokenizer
from megarl.data.examples.sizes import TinySizes
from megarl.data.examples.tiny import write_tiny_model
from megarl.hf_server.calls import read_call, write_reply
from megarl.hf_server.model import HFModel
from megarl.hf_server.scheduler import HFEngine
from megarl.mcore import cpu
from megarl.mcore.models.model import build_model
from megarl.mcore.setup import destroy_groups, make_groups
from megarl.mcore.training.optimizer import Optimizer, OptimSettings, wrap_for_training
from megarl.mcore.training.packed_rows import micro_batches
from megarl.mcore.training.step import Outputs, backward, forward_only, train_step
from megarl.rollout.protocol import SamplingParams, parse_replies
from megarl.samples.batch import Batch
from megarl.samples.sample import Completion, Prompt, Sample
from megarl.weights.hf.export import hf_tensors
from megarl.weights.hf.load import load_hf
from megarl.weights.verify.digests import digest

PROMPTS_PER_STEP, GROUP_SIZE = 32, 16
SAMPLING = SamplingParams(temperature=1.0, max_new_tokens=2)  # a digit and the end of the answer
LOSS = ActorLoss("ppo")
LAYOUT, DEVICE = Layout(), torch.device("cpu")  # one rank: no tensor, pipeline or context parallelism


# ---- the task


def draw_prompt(rng: random.Random, uid: str, tokenizer: PreTrainedTokenizerBase) -> Prompt:
    a, b = rng.randrange(10), rng.randrange(10)
    text = f"{a},{b}="
    return Prompt(uid, encode(tokenizer, text), text, ground_truth=str(max(a, b)))


def reward(prompt: Prompt, completion: Completion) -> float:
    """1 for the larger digit and nothing behind it; less for a text that begins with it, or with another digit."""
    first = completion.text[:1]
    if completion.text == prompt.ground_truth:
        return 1.0
    return 0.5 if first == prompt.ground_truth else 0.1 if first.isdigit() else 0.0


# ---- rollout


class Generator:
    """The engine of the hf server, without HTTP: transformers' modelling code, which shares nothing with the actor."""

    def __init__(self, folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
        self._model, self._tokenizer = HFModel(str(folder), torch.float32), tokenizer
        self._ended: SimpleQueue[BaseException | None] = SimpleQueue()  # None: a call is complete
        self._engine = HFEngine(
            self._model,
            max_running=PROMPTS_PER_STEP * GROUP_SIZE,
            max_total_tokens=None,
            random_seed=0,
            weight_version="0",
            on_done=lambda calls: self._ended.put(None),
            on_death=self._ended.put,
        )
        self._engine.start()

    def write(self, prompts: list[Prompt], n: int) -> list[list[Completion]]:
        """n completions of each prompt; each token has its log-prob and its weights' version."""
        prompt_ids = [prompt.token_ids for prompt in prompts]
        body = {"input_ids": prompt_ids, "sampling_params": SAMPLING.to_json(n), "return_logprob": True}
        call = read_call(body, self._model, self._engine.max_total_tokens)
        self._engine.submit(call)
        if error := self._ended.get():
            raise error
        found = [reply.completion for reply in parse_replies(write_reply(call, body), n * len(prompts))]
        texts = self._tokenizer.batch_decode([c.token_ids for c in found], skip_special_tokens=True)
        found = [replace(completion, text=text) for completion, text in zip(found, texts, strict=True)]
        return [found[first : first + n] for first in range(0, len(found), n)]

    def load(self, tensors: dict[str, Tensor], version: int) -> None:
        """New weights between two tokens.  What the generator then holds has to be what was sent, to the last bit."""
        sent = {name: digest(tensor) for name, tensor in tensors.items()}
        copy = lambda: self._model.load_weights(tensors)  # noqa: E731
        self._engine.run_alone(lambda: self._engine.load(copy, str(version), flush=True)).result()
        assert self._model.checksums() == sent, "the generator holds other weights than the actor"

    def stop(self) -> None:
        self._engine.stop()


# ---- the actor


class Actor:
    """A Megatron-Core model with its optimizer."""

    def __init__(self, folder: Path) -> None:
        self.hf = read_hf_config(folder)
        self.model = build_model(self.hf, LAYOUT)
        load_hf(self.model, folder, self.hf)
        self.model = wrap_for_training(self.model, LAYOUT)
        self.optimizer = Optimizer(self.model, OptimSettings(lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0))

    def log_probs(self, batch: Batch) -> Tensor:
        """[N] float32, of each token given those before it."""
        micros = micro_batches(batch.keep_columns(), [batch.num_sequences])  # all sequences in one packed row
        (columns,) = forward_only(self.model, micros, self._outputs("log_probs"), DEVICE)
        return columns["log_probs"]

    def update(self, batch: Batch) -> None:
        """One optimizer step.  The weight of a token comes from the whole step, so any split has the same gradient."""
        batch = step_columns(batch, loss=LOSS, agg_mode="token-mean").keep_columns(*LOSS.columns)
        micros, outputs = micro_batches(batch, [batch.num_sequences]), self._outputs(*LOSS.outputs)
        gradient = partial(backward, self.model, micros, outputs, LOSS, num_tokens=batch.num_tokens, device=DEVICE)
        train_step(self.optimizer, gradient)

    def _outputs(self, *names: str) -> Outputs:
        return Outputs(LAYOUT, self.hf["vocab_size"], SAMPLING.temperature, names)


# ---- the ring


def train(steps: int, folder: Path) -> list[float]:
    """The share of right answers at each step."""
    write_tiny_model(folder, TinySizes(hidden=64, layers=2, heads=4, kv_heads=2, head_dim=16, ffn=128))
    tokenizer, rng = load_tokenizer(str(folder)), random.Random(0)
    actor, generator = Actor(folder), Generator(folder, tokenizer)
    accuracy = []
    for step in range(steps):
        prompts = [draw_prompt(rng, f"{step}-{row}", tokenizer) for row in range(PROMPTS_PER_STEP)]
        groups = [
            [Sample.of(prompt, completion, reward(prompt, completion)) for completion in completions]
            for prompt, completions in zip(prompts, generator.write(prompts, GROUP_SIZE), strict=True)
        ]
        batch = make_batch(groups)
        batch = batch.with_columns(old_log_probs=actor.log_probs(batch))
        written = batch.columns["response_mask"] == 1
        gap = (batch.columns["old_log_probs"] - batch.columns["rollout_log_probs"])[written].abs().max()
        batch, _ = estimate(batch, adv_estimator="grpo")
        actor.update(batch)
        generator.load({name: t.clone() for name, t in hf_tensors(actor.model, actor.hf)}, version=step + 1)

        accuracy.append(sum(sample.reward == 1 for group in groups for sample in group) / batch.num_sequences)
        score = float(batch.per_sequence["score"].mean())
        line = f"step {step:3}  reward {score:.3f}  right {accuracy[-1]:.3f}  actor and generator differ by {gap:.1e}"
        print(line, flush=True)
    generator.stop()
    return accuracy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=160)
    steps = parser.parse_args().steps
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # a world of this process alone
    cpu.activate()
    make_groups(LAYOUT)
    with tempfile.TemporaryDirectory() as folder:
        train(steps, Path(folder) / "model")
    destroy_groups()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
