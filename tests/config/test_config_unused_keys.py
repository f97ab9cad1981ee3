"""Typed keys that would do nothing: each is told in one sentence, with the reason."""

import re

import pytest
from config_helpers import KEYS
from refusal_table import Block, blocks

from megarl.config import ConfigError, load_config
from megarl.config.keys import entry_types
from megarl.config.unused_keys import TABLE

# KEY=VALUE: has no effect, because ...
UNUSED = """
with algorithm.adv_estimator=grpo rollout.n=2 rollout.engine=hf rollout.urls=['http://a:1'] actor.strategy=fsdp
with trainer.n_gpus_per_node=2
critic.optim.lr=1 | algorithm.adv_estimator=grpo needs no critic
trainer.critic_warmup=1 | algorithm.adv_estimator=grpo needs no critic
algorithm.lam=0.9 | algorithm.adv_estimator=grpo has no lambda
algorithm.gamma=0.9 | algorithm.adv_estimator=grpo scores whole completions
reward.weights.auto=2 | there is one reward
reward.per_minute=20 | no reward is async
reward.model.path=m | no reward is called model
reward.judge.votes=2 | no reward is called judge
actor.clip_ratio_high=0.3 algorithm.policy_loss_fn=kl_cov | algorithm.policy_loss_fn=kl_cov has no clip
algorithm.rollout_correction.truncate=3 | algorithm.rollout_correction.level=null, so there is no weight
algorithm.rollout_correction.mask_low=0.5 | algorithm.rollout_correction.level=null, so there is no weight
algorithm.rollout_correction.normalize=true | algorithm.rollout_correction.level=null, so there is no weight
algorithm.rollout_correction.reject_level=sequence | algorithm.rollout_correction.reject_by=null
algorithm.rollout_correction.reject_high=2 | algorithm.rollout_correction.reject_by=null, so nothing is taken out
algorithm.filter_groups.metric=acc | algorithm.filter_groups.enable=false
algorithm.filter_groups.refill=false | algorithm.filter_groups.enable=false
algorithm.overlong_buffer.len=3 | algorithm.overlong_buffer.enable=false
reward.overlong_buffer.penalty_factor=0.5 | algorithm.overlong_buffer.enable=false
ref.model.path=m | actor.use_kl_loss and algorithm.use_kl_in_reward are both false
actor.lora.alpha=8 | actor.lora.rank=0 trains all weights
rollout.sglang.python=p | rollout.engine=hf is not sglang
actor.kl_loss_coef=0.1 | actor.use_kl_loss=false
actor.kl_loss_type=k1 | actor.use_kl_loss=false
actor.kl_importance=true | actor.use_kl_loss=false
algorithm.kl_penalty=k1 | algorithm.use_kl_in_reward=false
algorithm.kl_ctrl.kl_coef=0.1 | algorithm.use_kl_in_reward=false
actor.loss_scale_factor=5 | actor.loss_agg_mode=token-mean has no constant
actor.optim.momentum=0.9 | actor.optim.name=adamw has no momentum
actor.optim.min_lr=0 | actor.optim.lr_decay_style=constant never decays
rollout.val_kwargs.top_p=0.9 data.val_files=b | rollout.val_kwargs.temperature=0 is greedy
data.seed=5 data.shuffle=false | data.shuffle=false
trainer.total_epochs=2 trainer.total_training_steps=5 | trainer.total_training_steps=5 decides (null leaves it to the
trainer.node_rank=0 | trainer.nnodes=1
sft.epochs=2 | `megarl train` does not read it
rollout.num_servers=2 | rollout.urls names servers that run already
rollout.host=b | rollout.urls names servers that run already
rollout.tls=always | rollout.urls names servers that run already
rollout.slow_factor=9 | no collector has two servers to compare
rollout.memory_fraction=0.5 trainer.device=cpu | trainer.device=cpu uses no GPU
actor.megatron.use_distributed_optimizer=true | actor.strategy=fsdp shards everything, and overlaps always
critic.num_ranks=1 | algorithm.adv_estimator=grpo needs no critic
trainer.master_addr=here | trainer.nnodes=1
trainer.master_port=5 | trainer.nnodes=1
distill.coef=2 | there are no teachers

with actor.use_kl_loss=true teachers.math.model.path=a distill.form=reward reward.fn=model reward.model.path=m
with reward.model.url=http://h:1 algorithm.filter_groups.enable=true algorithm.filter_groups.refill=false rollout.n=2
with actor.clip_ratio_low=0.2 actor.clip_ratio_high=0.3
algorithm.lam=0.9 algorithm.adv_estimator=remax | algorithm.adv_estimator=remax has no lambda
reward.model.first_gpu=1 | reward.model.url names a server that runs already
actor.clip_ratio_c=5 algorithm.policy_loss_fn=cispo | algorithm.policy_loss_fn=cispo has no dual clip
algorithm.filter_groups.max_num_gen_batches=3 | algorithm.filter_groups.refill=false asks once
algorithm.kl_ctrl.horizon=5 algorithm.use_kl_in_reward=true | algorithm.kl_ctrl.type=fixed
actor.clip_ratio=0.1 | actor.clip_ratio_low and actor.clip_ratio_high are both set
actor.optim.beta1=0.9 actor.optim.name=sgd | actor.optim.name=sgd has no moments
trainer.test_freq=5 | there are no val_files, so nothing is evaluated
rollout.tls=never | servers at rollout.host=127.0.0.1 use http unless it is always
rollout.first_gpu=2 rollout.engine=sglang trainer.device=cpu | trainer.device=cpu uses no GPU
ref.megatron.recompute_granularity=selective | a reference is not trained
ref.megatron.optimizer_offload=true | a reference is not trained
ref.megatron.overlap_grad_reduce=true | a reference is not trained
ref.megatron.use_distributed_optimizer=true | a reference is not trained
actor.megatron.overlap_grad_reduce=true | there is one copy of the actor, so nothing is reduced or gathered
distill.divergence=jsd | distill.form=reward compares log-probs of the sampled tokens alone
distill.top_k=8 | distill.form=reward compares log-probs of the sampled tokens alone
distill.decay_steps=3 | distill.decay_style=constant never decays
teachers.math.megatron.optimizer_offload=true | a teacher is not trained
teachers.math.server.num_gpus=2 | teachers.math.engine=megatron asks no server

with algorithm.policy_loss_fn=reinforce teachers.math.model.path=a teachers.math.engine=server distill.top_k=8
algorithm.norm_adv_by_std_in_grpo=false rollout.n=2 | algorithm.adv_estimator=gae divides by no deviation of a group
algorithm.reward_weights.reward=1 | algorithm.adv_estimator=gae compares one reward
reward.model.api_key_env=KEY reward.fn=model reward.model.path=m | reward.model.url=null: the run starts a server
actor.clip_ratio=0.1 | algorithm.policy_loss_fn=reinforce has no clip
actor.clip_ratio_c=off | algorithm.policy_loss_fn=reinforce has no clip
critic.loss_scale_factor=5 | critic.loss_agg_mode=token-mean has no constant
critic.optim.betas=[0.9,0.9] critic.optim.name=sgd | critic.optim.name=sgd has no moments
rollout.host=b trainer.nnodes=2 | with trainer.nnodes=2 servers listen at the addresses of their machines
actor.optim.momentum=0.5 | actor.optim.name=adamw has no momentum
distill.beta=0.2 | distill.divergence=reverse_kl has no mixture
teachers.math.first_rank=0 | teachers.math.engine=server runs on no ranks
teachers.math.server.api_key_env=KEY | teachers.math.server.urls=[]: the run starts a server, and knows its key

with teachers.math.model.path=a algorithm.adv_estimator=none reward.fn=judge reward.judge.url=http://a/v1
with reward.judge.model=m reward.judge.prompt='{answer}' teachers.math.engine=server distill.top_k=8
with teachers.math.server.urls=[http://a:1]
reward.num_workers=2 | no reward runs in a process of its own
algorithm.gamma=0.5 | algorithm.adv_estimator=none scores whole completions
algorithm.advantage_clip=2 | algorithm.adv_estimator=none: every advantage is 0
actor.clip_ratio_high=0.3 | algorithm.adv_estimator=none: every advantage is 0, and so is the policy loss
algorithm.rollout_correction.level=token | algorithm.adv_estimator=none: every advantage is 0, and so is the policy loss
teachers.math.server.first_gpu=1 | teachers.math.server.urls names servers that run already

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


def test_every_row_of_the_table_of_inert_keys_names_keys_that_exist():
    for row in TABLE:
        for pattern in row.keys.split():
            known = (*KEYS, *entry_types())
            assert any(re.fullmatch(pattern.replace(".", r"\.").replace("*", ".*"), key) for key in known), pattern


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
