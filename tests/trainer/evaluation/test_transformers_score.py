"""A folder's score by transformers' own generate, from a process of its own."""

from functools import partial
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from megarl.data.chat import load_tokenizer
from megarl.data.examples.tiny import write_tiny_model
from megarl.rewards.scorer import Rewards
from megarl.sample import Prompt
from megarl.trainer.evaluation.transformers_score import Task, TransformersScore

REWARD = """
def length(prompt, completion):
    return len(completion.text.encode()) / 10

def never(prompt, completion):
    raise RuntimeError("it is broken")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(write_tiny_model(tmp_path_factory.mktemp("model") / "hf", layers=1, hidden=32, ffn=64))


@pytest.fixture
def reward(tmp_path: Path) -> str:
    (tmp_path / "reward.py").write_text(REWARD)
    return f"{tmp_path / 'reward.py'}"


def task(folder: Path, reward: str) -> Task:
    tokenizer = load_tokenizer(str(folder))
    texts = ["1+1=", "2+2=", "34+5=", "abc"]  # of several lengths
    prompts = [Prompt(str(i), tokenizer(text)["input_ids"], text, "") for i, text in enumerate(texts)]
    return Task(str(folder), prompts, partial(Rewards, [reward], num_workers=0, on_error="unscored"), 3)


def test_the_score_is_that_of_greedy_answers(folder: Path, reward: str, tmp_path: Path) -> None:
    made = task(folder, f"{reward}:length")
    pending = TransformersScore(made, tmp_path / "logs" / "log")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), load_tokenizer(str(folder))
    texts = []
    for prompt in made.prompts:
        ids = list(prompt.token_ids)
        for _ in range(3):
            logits = model(input_ids=model.dummy_inputs["input_ids"].new_tensor([ids])).logits
            ids.append(int(logits[0, -1].argmax()))
            if ids[-1] == model.config.eos_token_id:
                break
        texts.append(tokenizer.decode(ids[len(prompt.token_ids) :], skip_special_tokens=True))
    wanted = sum(len(text.encode()) / 10 for text in texts) / len(texts)
    assert wanted > 0
    assert pending.wait() == pytest.approx(wanted)


def test_answers_without_a_score_do_not_count(folder: Path, reward: str, tmp_path: Path) -> None:
    assert TransformersScore(task(folder, f"{reward}:never"), tmp_path / "log").wait() == 0.0


def test_a_process_that_fails_is_an_error_with_the_end_of_its_log(reward: str, tmp_path: Path) -> None:
    made = Task(str(tmp_path / "nowhere"), [], partial(Rewards, [f"{reward}:length"], num_workers=0), 3)
    with pytest.raises(RuntimeError, match=r"(?s)ended with exit code 1; their log: .*/log\n.*no tokenizer"):
        TransformersScore(made, tmp_path / "log").wait()
