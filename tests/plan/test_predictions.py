"""What a run that is asked to end says that it may lose."""

from megarl.arch.gpus import find
from megarl.config import Config, load_config
from megarl.plan.from_config import job_of
from megarl.plan.predict import step_time
from megarl.plan.predictions import lost_at_an_end


def composed(*words: str) -> Config:
    recipe = ["recipe=grpo_qwen2_5_7b_1x8h100", "data.train_files=[train.jsonl]"]
    return load_config([*recipe, *words], command="config")[0]


def test_a_run_whose_saves_are_far_apart_and_whose_steps_outlast_the_grace_says_what_it_may_lose() -> None:
    """Its step does not end in the time that a scheduler leaves: what counts is the time since the last save."""
    device, words = "NVIDIA H100 80GB HBM3", ["data.train_batch_size=2048", "trainer.save_every_s=null"]
    config = composed(*words)
    step_s = step_time(job_of(config, find("h100")))
    assert 20 * step_s > 3600 and 20 < step_s < 1800, "it saves every 20 steps"
    assert lost_at_an_end(config, device, 500) == (
        f"a step takes about {step_s:.0f} s (predicted), longer than trainer.term_grace_s=20: a run that is asked to "
        f"end may lose the work of {20 * step_s / 3600:.1f} hours since its last save; expected "
        "trainer.save_every_s=1800, or more time where the scheduler gives it"
    )
    assert lost_at_an_end(composed(*words, f"trainer.term_grace_s={step_s + 1}"), device, 500) == "", "it can be saved"
    assert lost_at_an_end(composed(words[0], "trainer.save_every_s=1800"), device, 500) == ""
    never = composed(*words, "trainer.save_freq=-1")
    assert f"the work of {30 * step_s / 3600:.1f} hours" in lost_at_an_end(never, device, 30)
    assert lost_at_an_end(never, device, 1) == "", "it is short"
    assert lost_at_an_end(config, "cpu", 500) == "", "nothing is predicted of it"
    unknown, _ = load_config(["recipe=quickstart", "model.path=nowhere"], command="config")
    assert lost_at_an_end(unknown, device, 500) == "", "the folder of its model is made when the run starts"
