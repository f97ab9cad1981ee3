"""A folder's score by transformers' own generate, from a process of its own."""

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from megarl.data.chat import load_tokenizer
from megarl.data.examples.sizes import TinySizes
from megarl.data.examples.tiny import write_tiny_model
from megarl.rewards.scorer import Rewards, RewardSettings
from megarl.samples.sample import Prompt
from megarl.trainer.evaluation.transformers_score import Task, TransformersScore, score

LIMIT_S = 240.0
REWARD = """
def length_or_hangs(prompt, completion):
    while prompt.uid == "2": pass
    return len(completion.text.encode()) / 10

def text_of(prompt, completion):
    return float(int.from_bytes(completion.text.encode()[:6], "big"))

def never(prompt, completion):
    raise RuntimeError("it is broken")

async def hangs(prompt, completion):
    while True: pass
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(write_tiny_model(tmp_path_factory.mktemp("model") / "hf", TinySizes(layers=1, hidden=32, ffn=64)))


@pytest.fixture
def reward(tmp_path: Path) -> str:
    (tmp_path / "reward.py").write_text(REWARD)
    return f"{tmp_path / 'reward.py'}"


def task(folder: Path, reward: str) -> Task:
    tokenizer = load_tokenizer(str(folder))
    texts = ["1+1=", "2+2=", "34+5=", "abc"]  # of several lengths
    prompts = [Prompt(str(i), tokenizer(text)["input_ids"], text, "") for i, text in enumerate(texts)]
    return Task(str(folder), prompts, partial(Rewards, [reward], RewardSettings(timeout_s=1.0)), 3)


@pytest.mark.full
def test_the_score_is_that_of_greedy_answers_but_for_one_on_which_the_reward_hangs(
    folder: Path, reward: str, tmp_path: Path
) -> None:
    """It has the limit of the run."""
    made = task(folder, f"{reward}:length_or_hangs")
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
    del texts[2]
    wanted = sum(len(text.encode()) / 10 for text in texts) / len(texts)
    assert wanted > 0
    assert pending.wait(lambda done, total: told.append((done, total))) == pytest.approx(wanted)
    assert told[0] == (0, 8) and {total for _, total in told} == {8}, "an answer and a reward of each of four prompts"
    assert sorted(told) == told and told[-1] == (8, 8)


def test_answers_without_a_score_do_not_count(folder: Path, reward: str) -> None:
    assert score(task(folder, f"{reward}:never"), lambda done: None) == 0.0


def test_penalties_of_generation_config_change_nothing_and_its_end_tokens_are_among_those_that_end(
    folder: Path, reward: str, tmp_path: Path
) -> None:
    """As in the servers; the folder with a penalty would else repeat no token."""
    plain, other = task(folder, f"{reward}:text_of"), tmp_path / "other"
    shutil.copytree(folder, other)
    found = score(plain, lambda done: None)
    file = other / "generation_config.json"
    of_folder = json.loads(file.read_text())
    file.write_text(json.dumps({**of_folder, "repetition_penalty": 1000.0, "no_repeat_ngram_size": 1}))
    assert score(plain._replace(folder=str(other)), lambda done: None) == found > 0
    file.write_text(
        json.dumps({**of_folder, "eos_token_id": list(range(3, 90))})
    )  # now the first token ends each answer
    assert score(plain._replace(folder=str(other)), lambda done: None) < found


@pytest.mark.full
def test_a_process_that_is_silent_is_ended_with_all_that_it_started(folder: Path, reward: str, tmp_path: Path) -> None:
    """An async reward that computes for ever blocks the whole process, so nothing in it can end that."""
    pending = TransformersScore(task(folder, f"{reward}:hangs"), tmp_path / "log", silence_s=LIMIT_S)

    def impatient(done: int, total: int) -> None:
        if done == 4:  # the answers are there; until then models are imported, however long that takes
            pending._silence_s = 1.0

    with pytest.raises(RuntimeError, match=r"^after 4 of 8 answers and rewards .* gave none for 1 s; their log: "):
        pending.wait(impatient)
    assert pending._process.poll() is not None
