"""Keys of evaluations: a length of their own, and how answers are drawn."""

from config_helpers import load, refusals

from megarl.config import load_config

DENSE = "model.config={model_type: llama, hidden_size: 64, num_attention_heads: 4, num_hidden_layers: 2, "
DENSE += "intermediate_size: 64, vocab_size: 128, max_position_embeddings: 2048}"
VAL = ("model.path=m", DENSE, "data.val_files=[v.jsonl]")
LONGER = "rollout.val_kwargs.max_response_length"


def test_an_evaluation_may_write_more_than_the_training_which_its_limit_follows_unless_it_is_set() -> None:
    assert load(*VAL, "data.max_response_length=100").rollout.val_kwargs.max_response_length == 100
    config = load(*VAL, f"{LONGER}=900")
    assert (config.data.max_response_length, config.rollout.val_kwargs.max_response_length) == (512, 900)
    assert config.longest == ("data.max_prompt_length + data.max_response_length", 1024 + 512)
    assert config.longest_served == (f"data.max_prompt_length + {LONGER}", 1024 + 900)
    assert config.actor.ppo_max_token_len_per_gpu == 16384, "nothing of it is trained"


def test_the_policy_must_know_the_positions_of_an_evaluation_and_a_critic_need_not() -> None:
    (said,) = refusals(*VAL, f"{LONGER}=1025")
    assert said.startswith(f"data.max_prompt_length + {LONGER}=2049: model.path=m knows 2048 positions")
    (said,) = refusals(*VAL, f"{LONGER}=1025", command="evaluate")
    assert f"{LONGER}=2049" in said
    (said,) = refusals(*VAL, f"{LONGER}=1000", "rollout.max_total_tokens=2000")
    assert said.endswith(f"expected room for one sequence, at least data.max_prompt_length + {LONGER} = 2024")
    load(*VAL, f"{LONGER}=1024", "actor.ppo_max_token_len_per_gpu=1536")


def test_greedy_answers_that_are_asked_for_several_times_are_a_warning() -> None:
    def warned(*words: str) -> bool:
        return any(
            "rollout.val_kwargs.n=4" in line for line in load_config(["data.train_files=[t.jsonl]", *VAL, *words])[1]
        )

    assert warned("rollout.val_kwargs.n=4")
    assert not warned("rollout.val_kwargs.n=4", "rollout.val_kwargs.temperature=0.6")
