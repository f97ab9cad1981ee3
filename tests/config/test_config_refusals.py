"""Values that cannot be: each is told in one sentence with its key, its value and what is expected."""

import re
from itertools import cycle, islice
from pathlib import Path

import pytest
from config_helpers import BASE, load, refusal, refusals
from refusal_table import JUDGE, Block, blocks

from megarl.config import ConfigError, load_config, names
from megarl.config.keys import schema_keys

TYPES = """
rollout.n=many | expected an integer
actor.optim.lr=fast | expected a number
actor.use_kl_loss=2 | expected true or false
actor.optim.betas=[a,b] | expected a list of numbers
trainer.logger=[[a]] | expected a list of texts
trainer.total_training_steps=soon | expected an integer or null
actor.clip_ratio_c=[1] | expected a number, text or null
trainer.experiment_name=[a] | expected text
algorithm.policy_loss_args=3 | expected names with a number each, as {name:0.1}
algorithm.policy_loss_args.beta=x | expected a number
algorithm.reward_weights={format:[1]} | expected a number
algorithm.adv_estimator_args=3 | expected names with any value each, as {name:0.1}
algorithm.policy_loss_args.a=[1] | expected a number
actor.optim=3 | actor.optim is a group of keys; expected actor.optim.NAME=VALUE
recipe=3 | expected the name of a recipe or the path of a YAML file
actor.ppo_epochs=1.5 | expected an integer
data.train_batch_size=null | expected an integer
rollout.num_servers=true | expected an integer
critic.optim.betas=0.9 | expected a list of numbers
~rollout.top_p | expected key=value, no key can be taken away
=3 | there is no key ; `megarl config` prints them all
rollout.top_k | expected key=value, with quotes around a value that has special characters
trainer.seed=1,2 | expected one value; a list is written [a,b]
trainer.nnodes=range(3) | expected one value; a list is written [a,b]
"""
VALUES = """
with actor.use_kl_loss=true actor.kl_loss_type=full algorithm.use_kl_in_reward=true algorithm.kl_ctrl.type=adaptive
with algorithm.rollout_correction.bypass=true
trainer.experiment_name=.. | expected the plain name of a folder
trainer.save_freq=0 | expected -1 (never) or at least 1
reward.fn=[] | expected at least one reward
reward.by_data_source={a:[]} | expected text
reward.audit=bleu | expected one of auto,
reward.memory_mb=0 | expected at least 1
algorithm.policy_loss_args.tau=1 | algorithm.policy_loss_fn=ppo takes no values of its own
algorithm.adv_estimator_args.a=1 | algorithm.adv_estimator=gae takes no values of its own
actor.kl_importance=true | actor.kl_loss_type=full is over all tokens, nothing is sampled; expected false
algorithm.kl_ctrl.kl_coef=0 | algorithm.kl_ctrl.type=adaptive only multiplies it; expected a number above 0
algorithm.rollout_correction.level=token | with bypass=true the ratio of ppo corrects already; expected null
algorithm.rollout_correction.truncate=0.5 | expected null or a number of at least 1
algorithm.filter_groups.enable=true | a group of rollout.n=1 has nothing to compare; expected at least 2
algorithm.overlong_buffer.enable=true | algorithm.overlong_buffer.len=null | expected 1 to data.max_response_length=512

with reward.fn=model reward.model.path=m actor.lora.rank=4 algorithm.filter_groups.enable=true rollout.n=2
reward.model.engine=megatron | algorithm.filter_groups compares rewards .. expected reward.model.engine=server
reward.model.engine=megatron data.val_files=b.jsonl | there is no other reward to .. expected reward.model.engine=server
reward.model.url=http://a:1 | has no effect, because reward.model.engine=megatron
ref.model.path=r | has no effect, because actor.use_kl_loss and algorithm.use_kl_in_reward are both
actor.clip_ratio_c=on | expected a number above 1, null or off
algorithm.gamma=nan | expected a number from 0 to 1
actor.lora.targets=[qkv] | expected [all-linear], or some of q_proj, k_proj, v_proj, q_a_proj, q_b_proj
actor.lora.push=adapter rollout.engine=hf | expected merged, because rollout.engine=hf serves no adapters
rollout.temperature=0 | expected a number above 0, because greedy completions give a policy nothing to learn
rollout.top_p=0 | expected a number above 0 and at most 1
rollout.top_k=0 | expected -1 (all tokens) or at least 1
rollout.max_total_tokens=100 | expected room for one sequence, at least data.max_prompt_length +
actor.ppo_max_token_len_per_gpu=100 | expected room for one sequence, at least data.max_prompt_length +
actor.ppo_mini_batch_size=100 | expected a divisor of data.train_batch_size=256, as 128 or 64
critic.ppo_mini_batch_size=100 | expected a divisor of data.train_batch_size=256, as 128 or 64

with actor.optim.lr_decay_style=linear trainer.nnodes=2 actor.optim.name=sgd
actor.ppo_micro_batch_size_per_gpu=0 | expected at least 1
actor.ppo_mini_batch_size=0 | expected at least 1
trainer.n_gpus_per_node=0 | expected at least 1
algorithm.adv_estimator=grpo | rollout.n=1 | algorithm.adv_estimator=grpo compares .. expected at least 2
algorithm.kl_penalty=k3+ algorithm.use_kl_in_reward=true | expected one of kl,
actor.optim.min_lr=1 | expected at most actor.optim.lr=1e-06
actor.optim.lr_decay_steps=5 actor.optim.lr_warmup_steps=5 | expected more than actor.optim.lr_warmup_steps=5
trainer.spike_sigma=0 | expected a number above 0
trainer.node_rank=2 | expected less than trainer.nnodes=2
trainer.master_addr='' | expected the address of machine 0, where the others find the run
trainer.master_port=0 | expected 1 to 65535
trainer.ports=80-90 | expected two ports from 1024 on, such as 41000-41999
trainer.max_restarts=-1 | expected a number of at least 0
actor.megatron.use_distributed_optimizer=true | Megatron shards adamw only; expected false with sgd
trainer.logger=[console,slack] | slack is none of console,

with data.val_files=[v] reward.model.path=m reward.model.engine=megatron
trainer.on_nonfinite=rollback | the run saves nothing to go back to .. expected trainer.save_freq=STEPS
trainer.critic_warmup=5 trainer.total_training_steps=5 | expected fewer than trainer.total_training_steps=5
trainer.experiment_name=a/b | expected the plain name of a folder
trainer.resume_mode=/nowhere | expected auto, disable or the folder of a checkpoint
reward.fn=bleu | expected one of auto,
reward.by_data_source={a/b-1.5:bleu} | reward.by_data_source.a/b-1.5=bleu | expected one of auto,
trainer.eval_beside=true rollout.placement=shared | with rollout.placement=shared servers .. expected false
reward.audit=model | reward.model.engine=megatron scores only .. expected reward.model.engine=server
reward.per_minute=0 | expected a number above 0
reward.concurrency=0 | expected at least 1
reward.retries=-1 | expected a number of at least 0
reward.sandbox=off | expected auto, jail, bubblewrap or url:http://HOST:PORT
agent.file_mb=0 | expected at least 1

data.apply_chat_template_kwargs.tokenize=true | the run decides this .. expected variables of the chat template
data.truncation=top | data.overlong_prompts=top | expected one of error, filter, left, right, middle
actor.clip_ratio=1.5 | expected a number between 0 and 1, both excluded
actor.clip_ratio_low=0 | expected a number above 0 and at most 1
actor.clip_ratio_c=1 | expected a number above 1, null or off
algorithm.gamma=1.1 | expected a number from 0 to 1
algorithm.lam=-0.1 | expected a number from 0 to 1
actor.optim.lr=inf | expected a number above 0
actor.optim.betas=[0.9] | expected two numbers from 0 to below 1
rollout.max_restarts=-1 | expected a number of at least 0
actor.lora.rank=-1 | expected a number of at least 0

with rollout.n=2 algorithm.filter_groups.enable=true trainer.n_gpus_per_node=2 actor.use_kl_loss=true
with actor.kl_loss_type=full+ algorithm.plugins=[a.py] algorithm.use_kl_in_reward=true
with algorithm.overlong_buffer.enable=true
reward.fn=[math,math] | expected each reward once; reward.weights says how much it counts
algorithm.policy_loss_args.tau=1 algorithm.policy_loss_fn=sapo | algorithm.policy_loss_fn=sapo takes tau_pos, tau_neg
algorithm.adv_estimator=gdpo | expected algorithm.reward_weights={NAME:WEIGHT,...}
ref.megatron.tensor_model_parallel_size=2 | with actor.kl_loss_type=full+: both .. expected the layout of the actor
algorithm.kl_penalty=mine+ | + shapes a gradient, a reward has none; expected mine
algorithm.filter_groups.metric=seq_reward | expected score, the reward before anything is added to it
algorithm.filter_groups.max_num_gen_batches=0 | expected at least 1
algorithm.overlong_buffer.len=513 | expected 1 to data.max_response_length=512
trainer.profile.steps=[0] | expected steps, counted from 1

with algorithm.policy_loss_args.tau_pos=inf algorithm.reward_weights.a=0 rollout.n=2
algorithm.policy_loss_fn=sapo | algorithm.policy_loss_args={tau_pos: inf} | expected finite numbers
algorithm.adv_estimator=gdpo | algorithm.reward_weights={a: 0.0} | expected finite numbers that are not all 0

with trainer.n_gpus_per_node=2 trainer.profile.steps=[2] algorithm.use_kl_in_reward=true algorithm.kl_penalty=full
reward.fn=[math,no.such.module:math] | reward.fn | math and no.such.module:math are .. expected functions of two names
ref.megatron.context_parallel_size=2 | with algorithm.kl_penalty=full: both .. expected the layout of the actor
trainer.profile.ranks=[0,2] | the run has ranks 0 to 1, so there is no rank 2
trainer.profile.memory=true trainer.device=cpu | trainer.device=cpu has no .. expected trainer.profile.tool=torch alone

with reward.weights.bleu=2
reward.fn=[math,exact] | reward.weights.bleu | expected one of the rewards math, exact
algorithm.policy_loss_fn=dro | expected a value in algorithm.policy_loss_args.beta, it has no default
trainer.profile.tool=nvtx | has no effect, because trainer.profile.steps=[]

with reward.weights.math=nan
reward.fn=[math,exact] | reward.weights={math: nan} | expected finite numbers

with algorithm.policy_loss_fn=reinforce
algorithm.rollout_correction.bypass=true | algorithm.policy_loss_fn=reinforce has .. expected false

with @judge
reward.judge.url=null | the reward judge needs it
reward.judge.model=null | the reward judge needs it
reward.judge.prompt=good? | expected {answer} in it, else the judge does not see the answer
reward.judge.read='(a' | expected json:FIELD, or a regular expression with one group, which holds the number
reward.judge.votes=0 | expected at least 1

with @judge
reward.judge.url=localhost:80 | expected http://HOST:PORT or https://HOST
reward.judge.read=a | expected json:FIELD, or a regular expression with one group, which holds the number

with @judge reward.fn=[judge,model] reward.model.path=m
reward.judge.read='json:' | expected json:FIELD, or a regular expression with one group, which holds the number
reward.model.url=h | expected http://HOST:PORT or https://HOST

actor.ppo_micro_batch_size_per_gpu=2 actor.ppo_max_token_len_per_gpu=4096 | expected only one of them

with reward.audit=gsm8k reward.weights.gsm8k=2
reward.fn=[math,exact] | reward.weights.gsm8k | expected one of the rewards math, exact
"""
AGENTS = """
with agent.fn=agent.py:episode algorithm.overlong_buffer.len=9
agent.command=[a] | expected [], because agent.fn=agent.py:episode is the agent
agent.max_tokens=1024 | expected more than data.max_prompt_length=1024, which an episode begins with
agent.timeout_s=0 | expected a number above 0
agent.ignore=[temperature,stop] | expected some of temperature, top_p, top_k, min_p,
agent.over_limit_reward=maybe | expected a finite number, unscored or reward.fn
trainer.check_export=true data.val_files=[v] | expected false, because transformers' generation runs no agents
algorithm.overlong_buffer.enable=true | expected false, because episodes have several answers
agent.args={b:1} | has no effect, because agent.command=[a]

with agent.fn=agent.py:episode agent.max_tokens=3000
actor.ppo_max_token_len_per_gpu=2000 | expected room for one sequence, at least agent.max_tokens = 3000

agent.fn=gone.py:episode | expected a file that exists, as path/to/file.py:function
reward.fn=nowhere/a.py:f | expected a file that exists, as path/to/file.py:function

agent.fn=agent.py | expected path/to/file.py:function, package.module:function, tools:..., verifiers:...
reward.fn=model | reward.model.path= | the reward model needs it, for its tokenizer at least

agent.max_turns=3 | has no effect, because agent.fn=null and agent.command=[]: completions are plain
reward.audit=math reward.fn=math | expected a reward that is not trained, and reward.fn has this one
"""
STRATEGIES = """
with trainer.n_gpus_per_node=8 rollout.n=2 trainer.device=cpu actor.lora.rank=8
with actor.megatron.recompute_granularity=selective actor.kl_loss_type=full ref.first_rank=4
actor.megatron.moe_token_dispatcher_type=flex | it runs on GPUs only; expected auto or alltoall
actor.megatron.transformer_impl=transformer_engine | it runs on GPUs only; expected auto or local
actor.megatron.transformer_impl=transformer_engine | adapters need local layers .. expected auto or local
actor.megatron.recompute_num_layers=1 | belongs to recompute_granularity=full; expected null, or full
actor.megatron.recompute_method=block | belongs to recompute_granularity=full; expected null, or full
critic.strategy=fsdp critic.optim.name=muon | it shards adamw only, not critic.optim.name=muon; expected megatron
actor.use_kl_loss=true | ref.num_ranks=4 | with actor.kl_loss_type=full: both .. expected actor.num_ranks=8
critic.num_ranks=4 critic.first_rank=6 | from rank 6 on the trainer has 8 ranks, 2 of them; expected 2
actor.strategy=none | expected megatron or fsdp, because there are 8 ranks

with trainer.n_gpus_per_node=8 rollout.n=2 actor.num_ranks=2 actor.lora.rank=8 trainer.device=cuda
actor.megatron.context_parallel_size=2 | on GPUs it needs Transformer Engine's .. expected 1
actor.megatron.recompute_granularity=full | expected recompute_method=uniform or block, and recompute_num_layers=NUMBER
critic.first_rank=8 | the trainer has 8 ranks; expected at most 7

with trainer.n_gpus_per_node=8 rollout.n=2 ref.num_ranks=2 ref.megatron.transformer_impl=local trainer.device=cuda
with actor.use_kl_loss=true
actor.megatron.moe_token_dispatcher_type=flex @dense | the model has no experts; expected auto or alltoall
ref.megatron.context_parallel_size=2 | on GPUs it needs Transformer Engine's .. expected 1
actor.megatron.overlap_param_gather=true | only the distributed optimizer .. expected use_distributed_optimizer=true

with trainer.n_gpus_per_node=8 rollout.n=2 actor.megatron.use_distributed_optimizer=true actor.lora.rank=4
actor.megatron.moe_token_dispatcher_type=flex @experts | each rank has all experts whole; expected auto or alltoall
actor.megatron.overlap_param_gather=true | actor.lora.rank=4 reads parameters past Megatron's hooks; expected false
ref.strategy=fsdp actor.use_kl_loss=true actor.kl_loss_type=full | with .. expected actor.strategy=megatron
actor.num_ranks=0 | expected at least 1
actor.first_rank=-1 | expected a number of at least 0

with trainer.n_gpus_per_node=8 rollout.n=2 @experts actor.megatron.expert_model_parallel_size=2
actor.megatron.moe_token_dispatcher_type=flex | it sends bfloat16, and model.dtype=float32; expected auto or alltoall
actor.megatron.use_distributed_optimizer=true | Megatron shards adamw only; expected false with muon
actor.optim.name=muon actor.lora.rank=4 | actor.lora.rank=4 trains thin matrices only; expected adamw or sgd

with rollout.n=2 @dense model.config.model_type=gpt_oss trainer.device=cuda trainer.n_gpus_per_node=2
with rollout.engine=sglang actor.num_ranks=2 model.dtype=bfloat16
with model.config.sliding_window=4 model.config.num_key_value_heads=1
actor.megatron.context_parallel_size=2 | on GPUs windows and attention sinks .. expected a divisor of them

with trainer.n_gpus_per_node=2 rollout.n=2 trainer.device=cuda actor.num_ranks=2
actor.megatron.transformer_impl=transformer_engine | its products round float32 to TF32 .. expected model.dtype=bfloat16
actor.megatron.context_parallel_size=2 | on GPUs it needs .. model.dtype=float32 means local layers; expected 1

with trainer.n_gpus_per_node=8 rollout.n=2 actor.lora.rank=4
actor.strategy=fsdp | actor.lora.rank=4 trains adapters only; expected megatron

with trainer.n_gpus_per_node=8 rollout.n=2 actor.num_ranks=1 actor.strategy=none
actor.megatron.use_distributed_optimizer=true | actor.strategy=none is one rank without a wrapper; expected false
"""


@pytest.fixture(autouse=True)
def agent_file(folder_of_the_test: None) -> None:
    Path("agent.py").write_text("async def episode(chat, prompt): ...\n")


@pytest.mark.parametrize("block", blocks(TYPES + VALUES + AGENTS + STRATEGIES), ids=str)
def test_what_cannot_be_is_refused_with_key_value_and_what_is_expected(block: Block) -> None:
    block.check()


def test_a_name_that_is_no_choice_of_its_key_is_refused_with_those_that_are() -> None:
    choices = {key.replace("NAME", "math"): known.record.choices.names for key, known in schema_keys().items()}
    choices = {key: allowed for key, allowed in choices.items() if allowed}
    told = refusals("teachers.math.model.path=a", *(f"{key}=no_such_name" for key in choices))
    assert len(told) == len(choices)
    for key, allowed in choices.items():
        expected = f"{key}=no_such_name: expected one of {', '.join(allowed)}"
        assert any(re.fullmatch(rf"{re.escape(expected)}(, or a name that .*)?", said) for said in told), key


@pytest.mark.parametrize("estimator", names.GROUP_ESTIMATORS)
def test_an_estimator_that_compares_wants_something_to_compare(estimator):
    told = refusal(*words_of(estimator), "rollout.n=1")
    assert told.startswith(f"rollout.n=1: algorithm.adv_estimator={estimator} compares")
    assert told.endswith("expected at least 2")


@pytest.mark.parametrize("estimator", ["remax", "reinforce_plus_plus"])
def test_an_estimator_that_compares_nothing_is_content_with_one_completion(estimator):
    config = load(f"algorithm.adv_estimator={estimator}")
    assert not config.uses_critic


def words_of(estimator: str) -> list[str]:
    """What an estimator cannot do without, beside a group."""
    words = [f"algorithm.adv_estimator={estimator}"]
    words += ["algorithm.reward_weights.reward=1"] if estimator in names.ESTIMATORS_WITH_REWARD_WEIGHTS else []
    return words + (["teachers.any.model.path=a"] if estimator == names.NO_ADVANTAGES else [])


def test_every_loss_and_every_estimator_runs_with_another():
    """No check looks at both, so that pairs are enough."""
    count = max(len(names.POLICY_LOSSES), len(names.ADV_ESTIMATORS))
    for loss, estimator in islice(zip(cycle(names.POLICY_LOSSES), cycle(names.ADV_ESTIMATORS), strict=False), count):
        required = [key for key, has_default in names.POLICY_LOSS_ARGS[loss].items() if not has_default]
        words = [f"algorithm.policy_loss_fn={loss}", *(f"algorithm.policy_loss_args.{key}=0.1" for key in required)]
        words += ["actor.loss_agg_mode=seq-mean-token-mean", "actor.use_kl_loss=true", "actor.kl_loss_type=full"]
        config = load(*words, *words_of(estimator), "rollout.n=2")
        assert (config.algorithm.policy_loss_fn, config.algorithm.adv_estimator) == (loss, estimator)


def test_what_a_command_cannot_do_without():
    for command, words, told in (
        ("train", ["model.path=m"], "data.train_files is not set: `megarl train` needs at least one file"),
        ("train", ["data.train_files=a"], "model.path is not set: `megarl train` needs a Hugging Face folder or hub"),
        ("sft", ["model.path=m"], "sft.train_files is not set"),
        ("evaluate", ["model.path=m"], "data.val_files is not set"),
        (
            "sft",
            ["model.path=m", "sft.train_files=[a]", "trainer.on_nonfinite=rollback"],
            "trainer.on_nonfinite=rollback: megarl sft does not go back to a checkpoint; expected stop or skip",
        ),
    ):
        with pytest.raises(ConfigError) as caught:
            load_config(words, command=command)
        assert told in str(caught.value)
    load_config([], command="doctor")
    load_config([], command="config")


def test_a_plug_in_may_bring_names_of_its_own():
    config = load("algorithm.plugins=[my.py]", "algorithm.policy_loss_fn=my_loss", "algorithm.adv_estimator=my_adv")
    assert config.algorithm.policy_loss_fn == "my_loss"
    load("algorithm.plugins=[my.py]", "algorithm.policy_loss_fn=my_loss", "algorithm.policy_loss_args.mine=1")
    load("algorithm.plugins=[my.py]", "algorithm.adv_estimator=my_adv", "algorithm.adv_estimator_args.how=fast")
    load("algorithm.plugins=[my.py]", "reward.fn=my_reward", "reward.per_minute=20")


def test_a_judges_request_may_have_fields_of_any_kind():
    words = [*JUDGE.split(), "reward.judge.request={response_format:{type:json_object},stop:[x]}"]
    assert load(*words, "reward.judge.request.temperature=0").reward.judge.request == {
        "response_format": {"type": "json_object"}, "stop": ["x"], "temperature": 0,
    }  # fmt: skip


def test_a_coefficient_of_zero_may_be_fixed_or_rest_in_a_recipe(tmp_path):
    fixed = load("algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.kl_coef=0")
    assert (fixed.algorithm.kl_ctrl.type, fixed.algorithm.kl_ctrl.kl_coef) == ("fixed", 0)
    (tmp_path / "mine.yaml").write_text("algorithm: {kl_ctrl: {type: adaptive, kl_coef: 0}}")
    assert not load(f"recipe={tmp_path}/mine.yaml").algorithm.use_kl_in_reward


def test_what_is_allowed_but_hardly_meant_is_warned_about():
    def said(*words: str) -> str:
        return " ".join(load_config([*BASE, *words])[1])

    assert "counts twice" in said("actor.use_kl_loss=true", "algorithm.use_kl_in_reward=true")
    assert "expected k1+ or low_var_kl" in said("actor.use_kl_loss=true", "actor.kl_loss_type=k1")
    assert not said("actor.use_kl_loss=true", "actor.kl_loss_type=k1+")
    assert not said("actor.use_kl_loss=true", "actor.kl_loss_type=k1", "actor.kl_importance=true")
    for loss in names.AGG_MODE_OF_LOSS:
        assert "expected seq-mean-token-mean" in said(f"algorithm.policy_loss_fn={loss}")
        assert not said(f"algorithm.policy_loss_fn={loss}", "actor.loss_agg_mode=sample_level")
