"""Typed keys that would do nothing: each is told in one sentence, with the reason."""

import re

import pytest
from config_helpers import BASE
from refusal_table import Block, blocks

from megarl.config import ConfigError, load_config
from megarl.config.effect import CONDITIONS, why_not
from megarl.config.keys import EMPTY, schema_keys
from megarl.config.validate.values import value_of

# KEY=VALUE: has no effect, because ...
UNUSED = """
with algorithm.adv_estimator=grpo rollout.n=2 rollout.engine=hf rollout.urls=['http://a:1'] actor.strategy=fsdp
with trainer.n_gpus_per_node=2
critic.optim.lr=1 | algorithm.adv_estimator=grpo needs no critic
trainer.critic_warmup=1 | algorithm.adv_estimator=grpo needs no critic
algorithm.lam=0.9 | algorithm.adv_estimator=grpo does not read it
algorithm.gamma=0.9 | algorithm.adv_estimator=grpo does not read it
reward.weights.auto=2 | there is one reward
reward.per_minute=20 | no reward is async
reward.model.path=m | no reward is called model
reward.judge.votes=2 | no reward is called judge
actor.clip_ratio_high=0.3 algorithm.policy_loss_fn=kl_cov | algorithm.policy_loss_fn=kl_cov does not read it
algorithm.rollout_correction.truncate=3 | algorithm.rollout_correction.level=null
algorithm.rollout_correction.mask_low=0.5 | algorithm.rollout_correction.level=null
algorithm.rollout_correction.normalize=true | algorithm.rollout_correction.level=null
algorithm.rollout_correction.reject_level=sequence | algorithm.rollout_correction.reject_by=null
algorithm.rollout_correction.reject_high=2 | algorithm.rollout_correction.reject_by=null
algorithm.filter_groups.metric=acc | algorithm.filter_groups.enable=false
algorithm.overlong_buffer.len=3 | algorithm.overlong_buffer.enable=false
reward.overlong_buffer.penalty_factor=0.5 | algorithm.overlong_buffer.enable=false
ref.model.path=m | actor.use_kl_loss and algorithm.use_kl_in_reward are both false
actor.lora.alpha=8 | actor.lora.rank=0
rollout.sglang.python=p | rollout.engine=hf
actor.kl_loss_coef=0.1 | actor.use_kl_loss=false
actor.kl_loss_type=k1 | actor.use_kl_loss=false
actor.kl_importance=true | actor.use_kl_loss=false
algorithm.kl_penalty=k1 | algorithm.use_kl_in_reward=false
algorithm.kl_ctrl.kl_coef=0.1 | algorithm.use_kl_in_reward=false
actor.loss_scale_factor=5 | actor.loss_agg_mode=token-mean and critic.loss_agg_mode=token-mean; it needs
actor.optim.momentum=0.9 | actor.optim.name=adamw
actor.optim.min_lr=1e-7 | actor.optim.lr_decay_style=constant
rollout.val_kwargs.top_p=0.9 data.val_files=b | rollout.val_kwargs.temperature=0.0
data.seed=5 data.shuffle=false | data.shuffle=false
trainer.total_epochs=2 trainer.total_training_steps=5 | trainer.total_training_steps=5
trainer.spare_nodes=1 | trainer.nnodes=1
sft.epochs=2 | `megarl train` does not read it
rollout.num_servers=2 | rollout.urls=[http://a:1]
rollout.host=b | rollout.urls=[http://a:1]
rollout.tls=always | rollout.urls=[http://a:1]
rollout.slow_factor=9 | no collector has two servers to compare
rollout.memory_fraction=0.5 trainer.device=cpu | trainer.device=cpu uses no GPU
actor.megatron.use_distributed_optimizer=true | actor.strategy=fsdp
critic.num_ranks=1 | algorithm.adv_estimator=grpo needs no critic
trainer.master_addr=here | trainer.nnodes=1
trainer.master_port=5 | trainer.nnodes=1
trainer.prometheus_host=10.0.0.1 | trainer.logger has no prometheus
distill.coef=2 | teachers={}

with actor.use_kl_loss=true teachers.math.model.path=a distill.form=reward reward.fn=model reward.model.path=m
with reward.model.url=http://h:1 algorithm.filter_groups.enable=true algorithm.filter_groups.refill=false rollout.n=2
with actor.clip_ratio_low=0.2 actor.clip_ratio_high=0.3
algorithm.lam=0.9 algorithm.adv_estimator=remax | algorithm.adv_estimator=remax does not read it
reward.model.first_gpu=1 | reward.model.url=http://h:1 names servers that run already
actor.clip_ratio_c=5 algorithm.policy_loss_fn=cispo | algorithm.policy_loss_fn=cispo does not read it
algorithm.filter_groups.max_num_gen_batches=3 | algorithm.filter_groups.refill=false
algorithm.kl_ctrl.horizon=5 algorithm.use_kl_in_reward=true | algorithm.kl_ctrl.type=fixed
actor.clip_ratio=0.1 | actor.clip_ratio_low=0.2 and actor.clip_ratio_high=0.3
actor.optim.beta1=0.9 actor.optim.name=sgd | actor.optim.name=sgd
trainer.test_freq=5 | data.val_files=[] and sft.val_files=[]
trainer.ports=41000-41999 | trainer.nnodes=1 and all servers are on this machine
trainer.private_network=true | trainer.nnodes=1 and all servers are on this machine
rollout.first_gpu=2 rollout.engine=sglang trainer.device=cpu | trainer.device=cpu uses no GPU
ref.megatron.recompute_granularity=selective | a reference is not trained
ref.megatron.optimizer_offload=true | a reference is not trained
ref.megatron.overlap_grad_reduce=true | a reference is not trained
ref.megatron.use_distributed_optimizer=true | a reference is not trained
actor.megatron.overlap_grad_reduce=true | there is one copy of the actor, so nothing is reduced or gathered
distill.divergence=jsd | distill.form=reward
distill.top_k=8 | distill.form=reward
distill.decay_steps=3 | distill.decay_style=constant
teachers.math.megatron.optimizer_offload=true | a teacher is not trained
teachers.math.server.num_gpus=2 | teachers.math.engine=megatron

with algorithm.policy_loss_fn=reinforce teachers.math.model.path=a teachers.math.engine=server distill.top_k=8
algorithm.reward_weights.reward=1 | algorithm.adv_estimator=gae does not read it
reward.model.api_key_env=KEY reward.fn=model reward.model.path=m | reward.model.url=null: the run starts a server
actor.clip_ratio=0.1 | algorithm.policy_loss_fn=reinforce does not read it
actor.clip_ratio_c=5 | algorithm.policy_loss_fn=reinforce does not read it
critic.loss_scale_factor=5 | critic.loss_agg_mode=token-mean and critic.loss_agg_mode=token-mean; it needs
critic.optim.betas=[0.9,0.9] critic.optim.name=sgd | critic.optim.name=sgd
rollout.host=b trainer.nnodes=2 | trainer.nnodes=2; it needs
actor.optim.momentum=0.5 | actor.optim.name=adamw
distill.beta=0.2 | distill.divergence=reverse_kl; it needs distill.divergence == jsd
teachers.math.num_ranks=1 | teachers.math.engine=server runs on no ranks
teachers.math.server.api_key_env=KEY | teachers.math.server.urls=[]: the run starts a server, and knows its key

with teachers.math.model.path=a algorithm.adv_estimator=none reward.fn=judge reward.judge.url=http://a/v1
with reward.judge.model=m reward.judge.prompt='{answer}' teachers.math.engine=server distill.top_k=8
with teachers.math.server.urls=[http://a:1]
reward.num_workers=2 | no reward runs in a process of its own
algorithm.gamma=0.5 | algorithm.adv_estimator=none does not read it
algorithm.advantage_clip=2 | algorithm.adv_estimator=none: every advantage is 0
actor.clip_ratio_high=0.3 | algorithm.adv_estimator=none: every advantage is 0, and so is the policy loss
algorithm.rollout_correction.level=token | algorithm.adv_estimator=none: every advantage is 0, and so is the policy loss
teachers.math.server.first_gpu=1 | teachers.math.server.urls=[http://a:1] names servers that run already

with rollout.n=2 algorithm.adv_estimator=optimal_token_baseline
actor.old_log_prob_freq=5 | each iteration makes a forward pass for its old log-probs
"""


# The same words as above, where something else makes them useless.
OTHERS = """
with rollout.num_servers=2 rollout.num_collectors=2 trainer.n_gpus_per_node=4
with actor.megatron.tensor_model_parallel_size=4
rollout.slow_factor=9 | no collector has two servers
actor.megatron.overlap_grad_reduce=true | there is one copy of the actor, so nothing is reduced
"""


@pytest.mark.parametrize("block", blocks((UNUSED + OTHERS).replace(" | ", " | has no effect, because ")), ids=str)
def test_a_typed_key_that_would_do_nothing_is_refused(block: Block) -> None:
    block.check()


def test_every_condition_of_a_key_can_be_asked() -> None:
    config, _ = load_config(["recipe=quickstart", "teachers.any.model.path=a"])
    for key, known in schema_keys().items():
        for condition in known.only_if:
            assert condition in CONDITIONS or re.fullmatch(r"\S+ [!=]= \S+( (or|\|) \S.*)?", condition), condition
            assert isinstance(why_not(config, key.replace(".NAME.", ".any."), condition), str)


NEEDED = {"data.train_files", "model.path"}
OFF = "trainer.test_freq=-1 actor.kl_importance=false trainer.critic_warmup=0 reward.per_minute=null rollout.tls=never"


@pytest.mark.parametrize("word", OFF.split())
def test_a_value_that_switches_a_thing_off_is_never_refused(word: str) -> None:
    load_config([*BASE, "algorithm.adv_estimator=grpo", "rollout.n=2", word])


def is_empty_by_default(key: str) -> bool:
    return schema_keys()[key].default in EMPTY and ".NAME." not in key


@pytest.mark.parametrize("key", sorted(filter(is_empty_by_default, schema_keys().keys() - NEEDED)))
def test_null_switches_off_what_is_empty_by_default(key: str) -> None:
    config, _ = load_config(["recipe=quickstart", f"{key}=null"])
    assert value_of(config, key) == schema_keys()[key].default


def test_a_key_acts_if_one_of_its_readers_does():
    load_config([*BASE, "reward.fn=[gsm8k]", "rollout.request_timeout_s=300"])
    with pytest.raises(ConfigError, match="^reward.request_timeout_s=300: .* because no reward is async"):
        load_config([*BASE, "reward.fn=[gsm8k]", "reward.request_timeout_s=300"])
    gae = [*BASE, "algorithm.adv_estimator=gae", "critic.loss_agg_mode=seq-mean-token-sum-norm"]
    load_config([*gae, "actor.loss_scale_factor=1000"])


def test_the_commands_refuse_what_they_do_not_read():
    sft = ("sft.train_files=a", "model.path=m")
    for typed in ("algorithm.lam=0.9", "data.train_files=a.jsonl", "rollout.n=2", "trainer.keep_best=2"):
        with pytest.raises(ConfigError, match=f"{typed}.*: has no effect, because `megarl sft` does not read it"):
            load_config([*sft, typed], command="sft")
    asks = ["model.path=m", "data.val_files=a", "reward.fn=mine"]
    load_config([*asks, "algorithm.plugins=[my.py]"], command="evaluate")
    schedule = ("ahead=1", "order=prompts", "update=drain", "max_age=2", "turn_s=30", "push=gathered", "check_every=1")
    sampled = ("n=4", "temperature=0.7", "top_p=0.9", "top_k=5")  # rollout.val_kwargs counts
    for typed in ("algorithm.policy_loss_fn=ppo", *(f"rollout.{word}" for word in (*schedule, *sampled))):
        words = [*asks[:2], "rollout.placement=shared" if "turn_s" in typed else "rollout.placement=separate", typed]
        with pytest.raises(ConfigError, match=f"^{typed}: has no effect, because `megarl evaluate` does not read it"):
            load_config(words, command="evaluate")
    load_config([*asks[:2], "rollout.val_kwargs.n=4", "rollout.max_in_flight=8"], command="evaluate")
    assert load_config([*sft, "sft.epochs=2", "actor.optim.lr=0.1"], command="sft")[0].sft.epochs == 2


def test_the_commands_on_pairs_have_the_rows_of_sft_and_dpo_has_keys_of_its_own() -> None:
    rows = ("sft.train_files=a", "model.path=m")
    config, _ = load_config([*rows, "dpo.beta=0.5", "dpo.loss=ipo", "sft.batch_size=8"], command="dpo")
    assert (config.dpo.beta, config.dpo.loss, config.sft.batch_size) == (0.5, "ipo", 8)
    for command, typed, why in (
        ("dpo", "dpo.beta=0.0", "expected a number above 0"),
        ("dpo", "dpo.label_smoothing=0.5", "expected a number from 0 to below 0.5"),
        ("dpo", "rollout.n=2", "because `megarl dpo` does not read it"),
        ("dpo", "sft.response_key=x", "because `megarl dpo` does not read it"),
        ("rm", "dpo.beta=0.5", "because `megarl rm` does not read it"),
        ("sft", "dpo.beta=0.5", "because `megarl sft` does not read it"),
    ):
        with pytest.raises(ConfigError, match=f"^{typed}: .*{why}"):
            load_config([*rows, typed], command=command)
    with pytest.raises(ConfigError, match="dpo.label_smoothing=0.1: has no effect, because dpo.loss=ipo"):
        load_config([*rows, "dpo.loss=ipo", "dpo.label_smoothing=0.1"], command="dpo")
    with pytest.raises(ConfigError, match="sft.train_files is not set: `megarl rm` needs at least one file"):
        load_config(["model.path=m"], command="rm")
    with pytest.raises(ConfigError, match="actor.mtp=detached: `megarl dpo` trains no MTP layers; expected off"):
        load_config([*rows, "model=deepseek_v3_mini", "actor.mtp=detached"], command="dpo")
