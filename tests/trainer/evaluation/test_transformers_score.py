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

LIMIT_S = 240.0
REWARD = """
def length(prompt, completion):
    return len(completion.text.encode()) / 10

def never(prompt, completion):
    raise RuntimeError("it is broken")

def hangs_on_one(prompt, completion):
    while prompt.uid == "2": pass
    return 0.5

async def hangs(prompt, completion):
    while True: pass
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
    return Task(str(folder), prompts, partial(Rewards, [reward], timeout_s=1.0), 3)


def test_the_score_is_that_of_greedy_answers(folder: Path, reward: str, tmp_path: Path) -> None:
    made = task(folder, f"{reward}:length")
    pending, told = TransformersScore(made, tmp_path / "logs" / "log", silence_s=LIMIT_S), []
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
    assert pending.wait(lambda done, total: told.append((done, total))) == pytest.approx(wanted)
    assert told[0] == (0, 8) and {total for _, total in told} == {8}, "an answer and a reward of each of four prompts"
    assert sorted(told) == told and told[-1] == (8, 8)


def test_answers_without_a_score_do_not_count(folder: Path, reward: str, tmp_path: Path) -> None:
    assert TransformersScore(task(folder, f"{reward}:never"), tmp_path / "log", silence_s=LIMIT_S).wait() == 0.0


def test_an_answer_on_which_the_reward_hangs_has_the_limit_of_the_run(
    folder: Path, reward: str, tmp_path: Path
) -> None:
    pending = TransformersScore(task(folder, f"{reward}:hangs_on_one"), tmp_path / "log", silence_s=LIMIT_S)
    assert pending.wait() == 0.5, "of the other three"


def test_a_process_that_is_silent_is_ended_with_all_that_it_started(folder: Path, reward: str, tmp_path: Path) -> None:
    """An async reward that computes for ever blocks the whole process, so nothing in it can end that."""
    pending = TransformersScore(task(folder, f"{reward}:hangs"), tmp_path / "log", silence_s=20.0)
    with pytest.raises(
        RuntimeError, match=r"^after 4 of 8 answers and rewards .* gave none for 20 s; their log: .*log$"
    ):
        pending.wait()
    assert pending._process.poll() is not None


def test_a_process_that_fails_is_an_error_with_the_end_of_its_log(reward: str, tmp_path: Path) -> None:
    made = Task(str(tmp_path / "nowhere"), [], partial(Rewards, [f"{reward}:length"], num_workers=0), 3)
    with pytest.raises(RuntimeError, match=r"(?s)ended with exit code 1; their log: .*/log\n.*no tokenizer"):
        TransformersScore(made, tmp_path / "log", silence_s=LIMIT_S).wait()
