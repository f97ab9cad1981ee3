"""Teachers in the configuration: groups of keys under names of one's own, and what is refused."""

from pathlib import Path

import pytest
from config_helpers import BASE, DENSE, load, refusal
from refusal_table import Block, blocks

from megarl.config import ConfigError, from_yaml, load_config, resolved, to_yaml
from megarl.config.keys import general, mapping_of, type_of

MATH, CODE = "teachers.math.model.path=a", "teachers.code.model.path=b"
OF_CODE = "teachers.code.data_sources=[code]"
ALONE = "algorithm.adv_estimator=none"


def test_an_entry_is_made_by_its_first_key_and_has_every_default() -> None:
    config = load(MATH, "actor.strategy=megatron", "trainer.n_gpus_per_node=2")
    (name, teacher) = next(iter(config.teachers.items()))
    assert (name, teacher.model.path, teacher.coef, teacher.data_sources) == ("math", "a", 1.0, [])
    assert (teacher.strategy, teacher.num_ranks, teacher.ppo_max_token_len_per_gpu) == ("megatron", 2, 16384)
    assert load().teachers == {}


def test_entries_are_set_by_words_by_files_and_at_once(tmp_path: Path) -> None:
    file = tmp_path / "taught.yaml"
    file.write_text("teachers:\n  math:\n    model: {path: a}\n    coef: 0.5\n")
    config = load(f"recipe={file}", CODE, OF_CODE, "teachers.math.coef=0.25")
    assert {name: (t.model.path, t.coef, t.data_sources) for name, t in config.teachers.items()} == {
        "math": ("a", 0.25, []),
        "code": ("b", 1.0, ["code"]),
    }
    assert load("teachers={math:{model:{path:a},coef:0.5}}").teachers["math"].coef == 0.5
    assert load(f"recipe={file}", "teachers={}").teachers == {}
    assert load(f"recipe={file}", "teachers={}", CODE).teachers.keys() == {"code"}


@pytest.mark.parametrize("name", ["a|b", "a\\nb", "[x]", "@", "-"])
def test_a_name_that_is_none_is_refused(tmp_path: Path, name: str) -> None:
    file = tmp_path / "taught.yaml"
    file.write_text(f'teachers:\n  "{name}":\n    model: {{path: a}}\n')
    with pytest.raises(ConfigError, match="^teachers.*: expected a name of letters, digits, _ and -$"):
        load(f"recipe={file}", "distill.coef=1.0")


def test_a_teacher_follows_the_actor_unless_its_own_layout_is_set() -> None:
    words = ("trainer.n_gpus_per_node=4", "actor.megatron.tensor_model_parallel_size=4", MATH, CODE, OF_CODE)
    config = load(
        *words, "teachers.code.megatron.tensor_model_parallel_size=2", "teachers.code.megatron.param_offload=true"
    )
    layouts = {n: (t.megatron.tensor_model_parallel_size, t.megatron.param_offload) for n, t in config.teachers.items()}
    assert layouts == {"math": (4, False), "code": (2, True)}
    again = load(*words, "teachers.code.megatron.tensor_model_parallel_size=null")
    assert again.teachers["code"].megatron.tensor_model_parallel_size == 4


def test_micro_batches_of_a_teacher_are_its_own_or_the_actor_s() -> None:
    config = load(
        MATH, "actor.ppo_max_token_len_per_gpu=4096", CODE, OF_CODE, "teachers.code.ppo_micro_batch_size_per_gpu=2"
    )
    cuts = {n: (t.ppo_micro_batch_size_per_gpu, t.ppo_max_token_len_per_gpu) for n, t in config.teachers.items()}
    assert cuts == {"math": (None, 4096), "code": (2, None)}


def test_what_is_written_is_read_back() -> None:
    config = load(MATH, CODE, OF_CODE, "distill.divergence=jsd", "distill.beta=0.1", "teachers.math.model.config.x=3")
    assert config.teachers["math"].model.config == {"x": 3}
    assert from_yaml(to_yaml(config)) == config == resolved(config)


def test_keys_of_entries_in_general() -> None:
    assert general("teachers.math.model.path") == "teachers.NAME.model.path"
    assert (general("teachers"), general("actor.optim.lr")) == ("teachers", "actor.optim.lr")
    assert mapping_of("teachers.math.model.config.a.b") == "teachers.math.model.config"
    assert mapping_of("teachers.math.coef") is None
    assert type_of("teachers.any.coef") is float and type_of("teachers.any.cof") is None


REFUSED = """
with teachers.math.model.path=a algorithm.adv_estimator=none rollout.n=4
teachers.math.cof=1 | there is no key teachers.math.cof; did you mean teachers.math.coef?
teachers.math=3 | teachers.math is a group of keys; expected teachers.math.NAME=VALUE
teachers.math.coef=much | expected a number
teachers=3 | expected names with a group of keys each
teachers.code.model.path=b | teachers.code.data_sources=[] | teachers.math .. expected the data_source's of at least one
distill.beta=0 | expected a number between 0 and 1, both excluded
rollout.top_p=0.9 rollout.top_k=20 | and rollout.top_k=20: teachers speak of the whole vocabulary; expected 1.0 and -1
algorithm.filter_groups.enable=true | algorithm.adv_estimator=none learns from .. expected false
teachers.math.first_rank=3 | the trainer has 1 ranks; expected at most 0

with teachers.math.model.path=a teachers.math.engine=server teachers.code.model.path=b
with teachers.math.data_sources=[sums,code]
teachers.math.coef=-1 | expected a number of at least 0
teachers.code.data_sources=[code] | teachers.math teaches code too; expected one teacher for each data_source
rollout.temperature=0.7 distill.form=reward | teachers.math.engine=server gives .. expected 1, or
teachers.math.server.urls=[here] | expected http://HOST:PORT or https://HOST

with teachers.math.model.path=a
distill.route=who | expected path/to/file.py:function, or package.module:function
distill.top_k=121 @dense | model.path=m has 120 tokens; expected fewer, or null
distill.decay_style=linear | expected distill.end_coef, the value that it goes to

with teachers.math.model.path=a teachers.math.@dense teachers.math.model.config.vocab_size=112
distill.route=no/such.py:who | expected a file that exists, as path/to/file.py:function
distill.top_k=113 | teachers.math.model.path=a has 112 tokens; expected fewer, or null
distill.end_coef=0 | expected distill.decay_style=linear or cosine, which lead to it

with teachers.code.model.path=b distill.route=m:f
teachers.math.coef=1 | teachers.math.model.path is not set | a teacher needs a Hugging Face folder or hub name
teachers.code.data_sources=[code] | distill.route=m:f says which teacher a prompt has; expected []

with teachers.math.engine=server
teachers.math.model.path=a | distill.top_k=null | teachers.math.engine=server reports .. such as 64

with teachers.math.model.path=a teachers.math.engine=server distill.top_k=8 rollout.engine=hf
teachers.math.server.num_gpus=2 | rollout.engine=hf serves on one; expected 1

algorithm.adv_estimator=none | every advantage is 0 .. expected teachers.NAME.model.path=FOLDER

with @dense trainer.n_gpus_per_node=4 teachers.math.model.path=a teachers.math.@dense
teachers.math.megatron.tensor_model_parallel_size=3 | does not divide .. heads=8; nearest: teachers.math.megatron.

with @dense trainer.n_gpus_per_node=4 teachers.math.model.path=a teachers.math.@dense
teachers.math.megatron.pipeline_model_parallel_size=5 | does not divide
"""


@pytest.mark.parametrize("block", blocks(REFUSED), ids=str)
def test_what_cannot_be_is_refused_with_one_sentence(block: Block) -> None:
    block.check()


def test_a_vocabulary_smaller_than_the_policy_s_has_no_divergence_over_it() -> None:
    smaller = f"teachers.math.{DENSE}".replace("vocab_size:120", "vocab_size:64")
    larger = f"teachers.math.{DENSE}".replace("vocab_size:120", "vocab_size:128")
    told = refusal(DENSE, MATH, smaller)
    assert told.startswith("teachers.math.model.path=a: its vocabulary has 64 tokens")
    assert "distill.top_k=null needs at least as many" in told
    load(DENSE, MATH, larger)


def test_a_server_needs_one_position_more_than_the_longest_row(tmp_path: Path) -> None:
    """It is asked for a new token too, which makes a row of all positions one too long."""
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 2048}')
    served = (f"teachers.math.model.path={tmp_path}", "teachers.math.engine=server", "distill.form=reward")
    assert refusal(*served, "data.max_response_length=1024").startswith(
        f"data.max_prompt_length + data.max_response_length=2048: teachers.math.model.path={tmp_path} knows 2048 "
    )
    load(*served, "data.max_response_length=1023")


def test_a_server_of_a_teacher_has_as_many_gpus_as_its_model_divides_over(tmp_path: Path) -> None:
    """SGLang would say so after it has loaded the model."""
    (tmp_path / "config.json").write_text('{"num_attention_heads": 8, "num_key_value_heads": 4}')
    served = (f"teachers.math.model.path={tmp_path}", "teachers.math.engine=server", "distill.form=reward")
    words = (*served, "rollout.engine=sglang", "teachers.math.server.num_gpus=3")
    assert refusal(*words) == (
        "teachers.math.server.num_gpus=3 does not divide the model's num_attention_heads=8; expected another number of "
        "GPUs"
    )
    load(*words[:-1], "teachers.math.server.num_gpus=4")


def test_what_has_an_effect_on_teachers_alone_is_read() -> None:
    """Their log-probs are advantages, DRO pulls to the old policy, and a rejected token teaches nothing."""
    words = ("algorithm.advantage_clip=2", "actor.clip_ratio=0.3", "algorithm.rollout_correction.level=token")
    load(MATH, ALONE, "distill.form=reward", *words)
    load(MATH, ALONE, "algorithm.policy_loss_fn=dro", "algorithm.policy_loss_args={beta:0.1}", words[2])
    load(MATH, ALONE, "algorithm.rollout_correction.reject_by=k3", "algorithm.rollout_correction.reject_high=0.1")


def test_other_commands_do_not_read_teachers() -> None:
    assert "`megarl evaluate` does not read it" in refusal(MATH, "data.val_files=[b.jsonl]", command="evaluate")
    assert "`megarl sft` does not read it" in refusal(MATH, "sft.train_files=[c.jsonl]", command="sft")


def test_teachers_alone_need_neither_critic_nor_groups() -> None:
    config, warnings = load_config([*BASE, MATH, ALONE])
    assert not config.uses_critic and config.rollout.n == 1
    assert not warnings
