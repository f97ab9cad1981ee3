"""Values that cannot be, and typed keys that would do nothing: each is told in one sentence."""

import re

import pytest
from config_helpers import BASE, KEYS, load, refusal

from megarl.config import ConfigError, load_config, names
from megarl.config.keys import entry_types
from megarl.config.unused_keys import TABLE

# ---- values that cannot be

MODEL = "reward.fn=model reward.model.path=m"
JUDGE = "reward.fn=judge reward.judge.url=http://a/v1 reward.judge.model=m reward.judge.prompt='{answer}'"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            "data.apply_chat_template_kwargs.tokenize=true",
            "data.apply_chat_template_kwargs.tokenize=true: the run decides this; expected variables of the chat temp",
        ),
        (f"{MODEL} reward.model.engine=tpu", "reward.model.engine=tpu: expected one of server, megatron"),
        (
            f"{MODEL} reward.model.engine=megatron algorithm.filter_groups.enable=true rollout.n=2",
            "reward.model.engine=megatron: algorithm.filter_groups compares rewards before the ranks score",
        ),
        (
            f"{MODEL} reward.model.engine=megatron data.val_files=b.jsonl",
            "reward.model.engine=megatron: there is no other reward to evaluate with",
        ),
        (
            f"{MODEL} reward.model.engine=megatron reward.model.url=http://a:1",
            "reward.model.url=http://a:1: has no effect, because reward.model.engine=megatron asks no server",
        ),
        (
            f"{MODEL} reward.model.engine=megatron ref.model.path=r",
            "ref.model.path=r: has no effect, because actor.use_kl_loss and algorithm.use_kl_in_reward are both false",
        ),
        ("data.truncation=top", "data.overlong_prompts=top: expected one of error, filter, left, right, middle"),
        ("actor.clip_ratio=1.5", "actor.clip_ratio=1.5: expected a number between 0 and 1, both excluded"),
        ("actor.clip_ratio_low=0", "actor.clip_ratio_low=0.0: expected a number above 0 and at most 1"),
        ("actor.clip_ratio_c=1", "actor.clip_ratio_c=1.0: expected a number above 1, null or off"),
        ("actor.clip_ratio_c=on", "actor.clip_ratio_c=on: expected a number above 1, null or off"),
        ("algorithm.gamma=1.1", "algorithm.gamma=1.1: expected a number from 0 to 1"),
        ("algorithm.lam=-0.1", "algorithm.lam=-0.1: expected a number from 0 to 1"),
        ("algorithm.gamma=nan", "algorithm.gamma=nan: expected a number from 0 to 1"),
        ("actor.optim.lr=inf", "actor.optim.lr=inf: expected a number above 0"),
        ("actor.optim.betas=[0.9]", "actor.optim.betas=[0.9]: expected two numbers from 0 to below 1"),
        ("actor.optim.name=lion", "actor.optim.name=lion: expected one of adamw, sgd, muon"),
        ("rollout.push=fast", "rollout.push=fast: expected one of auto, gathered, shared, sharded"),
        ("rollout.engine=vllm", "rollout.engine=vllm: expected one of auto, hf, sglang"),
        ("rollout.max_restarts=-1", "rollout.max_restarts=-1: expected a number of at least 0"),
        ("actor.lora.rank=-1", "actor.lora.rank=-1: expected a number of at least 0"),
        (
            "actor.lora.rank=4 actor.lora.targets=[qkv]",
            "actor.lora.targets=[qkv]: expected [all-linear], or some of q_proj, k_proj",
        ),
        (
            "actor.lora.rank=4 actor.lora.push=adapter rollout.engine=hf",
            "expected merged, because rollout.engine=hf serves no adapters",
        ),
        ("rollout.temperature=0", "rollout.temperature=0.0: expected a number above 0, because greedy"),
        ("rollout.top_p=0", "rollout.top_p=0.0: expected a number above 0 and at most 1"),
        ("rollout.top_k=0", "rollout.top_k=0: expected -1 (all tokens) or at least 1"),
        ("rollout.engine=vllm", "rollout.engine=vllm: expected one of auto"),
        (
            "rollout.max_total_tokens=100",
            "expected room for one sequence, at least data.max_prompt_length + data.max_re",
        ),
        ("actor.ppo_max_token_len_per_gpu=100", "expected room for one sequence"),
        ("actor.ppo_micro_batch_size_per_gpu=0", "actor.ppo_micro_batch_size_per_gpu=0: expected at least 1"),
        (
            "actor.ppo_mini_batch_size=100",
            "actor.ppo_mini_batch_size=100: expected a divisor of data.train_batch_size=256, as 128 or 64",
        ),
        ("critic.ppo_mini_batch_size=100", "critic.ppo_mini_batch_size=100: expected a divisor"),
        ("actor.ppo_mini_batch_size=0", "actor.ppo_mini_batch_size=0: expected at least 1"),
        ("trainer.n_gpus_per_node=0", "trainer.n_gpus_per_node=0: expected at least 1"),
        (
            "algorithm.adv_estimator=grpo",
            "rollout.n=1: algorithm.adv_estimator=grpo compares completions of one prompt",
        ),
        (
            "algorithm.use_kl_in_reward=true algorithm.kl_penalty=k3+",
            "algorithm.kl_penalty=k3+: expected one of kl, k1",
        ),
        (
            "actor.optim.lr_decay_style=linear actor.optim.min_lr=1",
            "actor.optim.min_lr=1.0: expected at most actor.optim.lr",
        ),
        (
            "actor.optim.lr_decay_style=linear actor.optim.lr_decay_steps=5 actor.optim.lr_warmup_steps=5",
            "actor.optim.lr_decay_steps=5: expected more than actor.optim.lr_warmup_steps=5",
        ),
        ("trainer.on_nonfinite=ignore", "trainer.on_nonfinite=ignore: expected one of stop, skip, rollback"),
        ("trainer.spike_sigma=0", "trainer.spike_sigma=0.0: expected a number above 0"),
        (
            "trainer.on_nonfinite=rollback",
            "trainer.on_nonfinite=rollback: the run saves nothing to go back to; expected",
        ),
        ("trainer.total_training_steps=5 trainer.critic_warmup=5", "trainer.critic_warmup=5: expected fewer than"),
        ("trainer.nnodes=2 trainer.node_rank=2", "trainer.node_rank=2: expected less than trainer.nnodes=2"),
        ("trainer.nnodes=2 trainer.master_addr=''", "trainer.master_addr=: expected the address of machine 0"),
        ("trainer.nnodes=2 trainer.master_port=0", "trainer.master_port=0: expected 1 to 65535"),
        ("trainer.max_restarts=-1", "trainer.max_restarts=-1: expected a number of at least 0"),
        (
            "actor.optim.name=sgd actor.megatron.use_distributed_optimizer=true",
            "actor.megatron.use_distributed_optimizer=true: Megatron shards adamw only; expected false with sgd",
        ),
        ("trainer.logger=[console,slack]", "trainer.logger=[console, slack]: slack is none of console, jsonl"),
        ("trainer.experiment_name=a/b", "trainer.experiment_name=a/b: expected the plain name of a folder"),
        ("trainer.experiment_name=..", "expected the plain name of a folder"),
        ("trainer.resume_mode=/nowhere", "expected auto, disable or the folder of a checkpoint"),
        ("trainer.save_freq=0", "trainer.save_freq=0: expected -1 (never) or at least 1"),
        ("reward.fn=bleu", "reward.fn=bleu: expected one of auto, choice, code, code_strict, exact, gsm8k"),
        ("reward.fn=[math,bleu]", "reward.fn=bleu: expected one of auto, choice, code, code_strict, exact, gsm8k"),
        ("reward.fn=[]", "reward.fn=[]: expected at least one reward"),
        ("reward.fn=[math,math]", "reward.fn=[math, math]: expected each reward once; reward.weights says how much"),
        (
            "reward.fn=[math,no.such.module:math]",
            "reward.fn: math and no.such.module:math are both called math in the log; expected functions of two names",
        ),
        (
            "reward.fn=[math,exact] reward.weights.bleu=2",
            "reward.weights.bleu: expected one of the rewards math, exact",
        ),
        ("reward.fn=[math,exact] reward.weights.math=nan", "reward.weights={math: nan}: expected finite numbers"),
        ("reward.by_data_source={a/b-1.5:bleu}", "reward.by_data_source.a/b-1.5=bleu: expected one of auto, choice"),
        ("reward.by_data_source={a:[]}", "expected text"),
        ("reward.fn=math reward.audit=math", "reward.audit=math: expected a reward that is not trained, and reward.fn"),
        (
            "trainer.eval_beside=true data.val_files=[v] rollout.placement=shared",
            "trainer.eval_beside=true: with rollout.placement=shared servers sleep while the trainer works",
        ),
        ("reward.audit=bleu", "reward.audit=bleu: expected one of auto, choice"),
        (
            "reward.fn=[math,exact] reward.audit=gsm8k reward.weights.gsm8k=2",
            "reward.weights.gsm8k: expected one of the rewards math, exact",
        ),
        (
            "reward.audit=model reward.model.path=m reward.model.engine=megatron",
            "reward.audit=model: reward.model.engine=megatron scores only what is trained; expected",
        ),
        (
            "trainer.published.after=56.7 data.val_files=[v]",
            "trainer.published.after=56.7: expected a number from 0 to 1",
        ),
        (JUDGE.replace("url=http://a/v1", "url=null"), "reward.judge.url=null: the reward judge needs it"),
        (JUDGE.replace("model=m", "model=null"), "reward.judge.model=null: the reward judge needs it"),
        (
            f"{JUDGE} reward.judge.url=localhost:80",
            "reward.judge.url=localhost:80: expected http://HOST:PORT or https://HOST",
        ),
        (f"{JUDGE} reward.judge.prompt=good?", "reward.judge.prompt=good?: expected {answer} in it"),
        (f"{JUDGE} reward.judge.read='(a'", "reward.judge.read=(a: expected json:FIELD, or a regular expression with"),
        (f"{JUDGE} reward.judge.read=a", "reward.judge.read=a: expected json:FIELD, or a regular expression with one"),
        (f"{JUDGE} reward.judge.read='json:'", "reward.judge.read=json:: expected json:FIELD"),
        (f"{JUDGE} reward.judge.votes=0", "reward.judge.votes=0: expected at least 1"),
        ("reward.fn=model", "reward.model.path=null: the reward model needs it, for its"),
        ("reward.fn=model reward.model.path=m reward.model.url=h", "reward.model.url=h: expected http://HOST:PORT"),
        ("reward.on_error=ignore", "reward.on_error=ignore: expected one of unscored, zero, stop"),
        ("reward.per_minute=0", "reward.per_minute=0.0: expected a number above 0"),
        ("reward.concurrency=0", "reward.concurrency=0: expected at least 1"),
        ("reward.retries=-1", "reward.retries=-1: expected a number of at least 0"),
        ("reward.sandbox=off", "reward.sandbox=off: expected auto, jail, bubblewrap or url:http://HOST:PORT"),
        ("agent.file_mb=0", "agent.file_mb=0: expected at least 1"),
        ("reward.memory_mb=0", "reward.memory_mb=0: expected at least 1"),
        ("algorithm.policy_loss_args.tau=1", "args.tau=1.0: algorithm.policy_loss_fn=ppo takes no values of its own"),
        (
            "algorithm.policy_loss_fn=sapo algorithm.policy_loss_args.tau=1",
            "algorithm.policy_loss_args.tau=1.0: algorithm.policy_loss_fn=sapo takes tau_pos, tau_neg",
        ),
        (
            "algorithm.policy_loss_fn=sapo algorithm.policy_loss_args.tau_pos=inf",
            "algorithm.policy_loss_args={tau_pos: inf}: expected finite numbers",
        ),
        ("algorithm.policy_loss_fn=dro", "expected a value in algorithm.policy_loss_args.beta, it has no default"),
        (
            "algorithm.adv_estimator_args.a=1",
            "algorithm.adv_estimator_args.a=1: algorithm.adv_estimator=gae takes no values of its own",
        ),
        ("algorithm.adv_estimator=gdpo rollout.n=2", "gdpo: expected algorithm.reward_weights={NAME:WEIGHT,...}"),
        (
            "algorithm.adv_estimator=gdpo rollout.n=2 algorithm.reward_weights.a=0",
            "algorithm.reward_weights={a: 0.0}: expected finite numbers that are not all 0",
        ),
        (
            "actor.use_kl_loss=true actor.kl_loss_type=full actor.kl_importance=true",
            "actor.kl_importance=true: actor.kl_loss_type=full is over all tokens, nothing is sampled; expected false",
        ),
        (
            "trainer.n_gpus_per_node=2 actor.use_kl_loss=true actor.kl_loss_type=full+ "
            "ref.megatron.tensor_model_parallel_size=2",
            "ref.megatron.tensor_model_parallel_size=2 with actor.kl_loss_type=full+: both models run on the same",
        ),
        (
            "trainer.n_gpus_per_node=2 algorithm.use_kl_in_reward=true algorithm.kl_penalty=full "
            "ref.megatron.context_parallel_size=2",
            "ref.megatron.context_parallel_size=2 with algorithm.kl_penalty=full: both models run on the same ranks",
        ),
        (
            "algorithm.plugins=[a.py] algorithm.use_kl_in_reward=true algorithm.kl_penalty=mine+",
            "algorithm.kl_penalty=mine+: + shapes a gradient, a reward has none; expected mine",
        ),
        (
            "algorithm.use_kl_in_reward=true algorithm.kl_ctrl.type=adaptive algorithm.kl_ctrl.kl_coef=0",
            "algorithm.kl_ctrl.kl_coef=0: algorithm.kl_ctrl.type=adaptive only multiplies it; expected a number above "
            "0",
        ),
        (
            "algorithm.rollout_correction.bypass=true algorithm.policy_loss_fn=reinforce",
            "bypass=true: algorithm.policy_loss_fn=reinforce has no ratio that it could change; expected false",
        ),
        (
            "algorithm.rollout_correction.bypass=true algorithm.rollout_correction.level=token",
            "algorithm.rollout_correction.level=token: with bypass=true the ratio of ppo corrects already; expected "
            "null",
        ),
        ("algorithm.rollout_correction.level=word", "expected one of token, sequence, geometric"),
        ("algorithm.rollout_correction.reject_by=k4", "expected one of ratio, k1, k2, k3"),
        ("algorithm.rollout_correction.reject_by=k1 algorithm.rollout_correction.reject_level=word", "token, sequence"),
        ("algorithm.rollout_correction.level=token algorithm.rollout_correction.truncate=0.5", "at least 1"),
        ("algorithm.filter_groups.enable=true", "a group of rollout.n=1 has nothing to compare; expected at least 2"),
        (
            "rollout.n=2 algorithm.filter_groups.enable=true algorithm.filter_groups.metric=seq_reward",
            "algorithm.filter_groups.metric=seq_reward: expected score",
        ),
        (
            "rollout.n=2 algorithm.filter_groups.enable=true algorithm.filter_groups.max_num_gen_batches=0",
            "algorithm.filter_groups.max_num_gen_batches=0: expected at least 1",
        ),
        (
            "algorithm.overlong_buffer.enable=true",
            "algorithm.overlong_buffer.len=null: expected 1 to data.max_response_le",
        ),
        (
            "algorithm.overlong_buffer.enable=true algorithm.overlong_buffer.len=513",
            "algorithm.overlong_buffer.len=513: expected 1 to data.max_response_length=512",
        ),
        ("reward.fn=nowhere/a.py:f", "reward.fn=nowhere/a.py:f: expected a file that exists"),
    ],
)
def test_an_impossible_value_is_refused_in_one_sentence(words, told):
    assert told in refusal(*words.split())


@pytest.mark.parametrize("estimator", names.GROUP_ESTIMATORS)
def test_an_estimator_that_compares_wants_something_to_compare(estimator):
    words = [f"algorithm.adv_estimator={estimator}", "rollout.n=1"]
    words += ["algorithm.reward_weights.reward=1"] if estimator == "gdpo" else []
    words += ["teachers.math.model.path=a"] if estimator == names.NO_ADVANTAGES else []
    assert refusal(*words) == (
        f"rollout.n=1: algorithm.adv_estimator={estimator} compares completions of one prompt; expected at least 2"
    )


@pytest.mark.parametrize("estimator", ["remax", "reinforce_plus_plus"])
def test_an_estimator_that_compares_nothing_is_content_with_one_completion(estimator):
    config = load(f"algorithm.adv_estimator={estimator}")
    assert not config.uses_critic


@pytest.mark.parametrize("loss", names.POLICY_LOSSES)
@pytest.mark.parametrize("estimator", names.ADV_ESTIMATORS)
def test_every_loss_runs_with_every_estimator(loss, estimator):
    words = [f"algorithm.policy_loss_fn={loss}", f"algorithm.adv_estimator={estimator}", "rollout.n=2"]
    words += [
        f"algorithm.policy_loss_args.{name}=0.1"
        for name, has_default in names.POLICY_LOSS_ARGS[loss].items()
        if not has_default
    ]
    words += ["algorithm.reward_weights.reward=1"] if estimator == "gdpo" else []
    words += ["teachers.any.model.path=a"] if estimator == names.NO_ADVANTAGES else []
    words += ["actor.loss_agg_mode=seq-mean-token-mean", "actor.use_kl_loss=true", "actor.kl_loss_type=full"]
    config = load(*words)
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


# ---- typed keys that would do nothing


@pytest.mark.parametrize(
    ("words", "because"),
    [
        ("critic.optim.lr=1 algorithm.adv_estimator=grpo", "algorithm.adv_estimator=grpo needs no critic"),
        ("trainer.critic_warmup=1 algorithm.adv_estimator=grpo", "algorithm.adv_estimator=grpo needs no critic"),
        ("algorithm.lam=0.9 algorithm.adv_estimator=grpo", "algorithm.adv_estimator=grpo has no lambda"),
        ("algorithm.lam=0.9 algorithm.adv_estimator=remax", "algorithm.adv_estimator=remax has no lambda"),
        ("algorithm.gamma=0.9 algorithm.adv_estimator=grpo", "algorithm.adv_estimator=grpo scores whole completions"),
        ("algorithm.norm_adv_by_std_in_grpo=false", "algorithm.adv_estimator=gae divides by no deviation"),
        ("algorithm.reward_weights.reward=1", "algorithm.adv_estimator=gae compares one reward"),
        ("reward.weights.auto=2", "there is one reward"),
        ("reward.per_minute=20", "no reward is async"),
        ("reward.model.path=m", "no reward is called model"),
        (f"reward.model.first_gpu=1 {MODEL} reward.model.url=http://h:1", "reward.model.url names a server that runs"),
        (f"reward.model.api_key_env=KEY {MODEL}", "reward.model.url=null: the run starts a server, and knows its key"),
        ("reward.judge.votes=2", "no reward is called judge"),
        (f"reward.num_workers=2 {JUDGE}", "no reward runs in a process of its own"),
        ("actor.clip_ratio_high=0.3 algorithm.policy_loss_fn=kl_cov", "algorithm.policy_loss_fn=kl_cov has no clip"),
        ("actor.clip_ratio_c=5 algorithm.policy_loss_fn=cispo", "algorithm.policy_loss_fn=cispo has no dual clip"),
        ("algorithm.rollout_correction.truncate=3", "algorithm.rollout_correction.level=null, so there is no weight"),
        ("algorithm.rollout_correction.mask_low=0.5", "algorithm.rollout_correction.level=null"),
        ("algorithm.rollout_correction.normalize=true", "algorithm.rollout_correction.level=null"),
        ("algorithm.rollout_correction.reject_level=sequence", "algorithm.rollout_correction.reject_by=null"),
        ("algorithm.rollout_correction.reject_high=2", "algorithm.rollout_correction.reject_by=null"),
        ("algorithm.filter_groups.metric=acc", "algorithm.filter_groups.enable=false"),
        ("algorithm.filter_groups.refill=false", "algorithm.filter_groups.enable=false"),
        (
            "algorithm.filter_groups.max_num_gen_batches=3 algorithm.filter_groups.enable=true "
            "algorithm.filter_groups.refill=false",
            "algorithm.filter_groups.refill=false asks once",
        ),
        ("algorithm.overlong_buffer.len=3", "algorithm.overlong_buffer.enable=false"),
        ("reward.overlong_buffer.penalty_factor=0.5", "algorithm.overlong_buffer.enable=false"),
        (
            "ref.model.path=m",
            "actor.use_kl_loss and algorithm.use_kl_in_reward are both false, so there is no reference",
        ),
        ("actor.lora.alpha=8", "actor.lora.rank=0 trains all weights"),
        ("rollout.sglang.python=p rollout.engine=hf", "rollout.engine=hf is not sglang"),
        ("actor.kl_loss_coef=0.1", "actor.use_kl_loss=false"),
        ("actor.kl_loss_type=k1", "actor.use_kl_loss=false"),
        ("actor.kl_importance=true", "actor.use_kl_loss=false"),
        ("algorithm.kl_penalty=k1", "algorithm.use_kl_in_reward=false"),
        ("algorithm.kl_ctrl.kl_coef=0.1", "algorithm.use_kl_in_reward=false"),
        ("algorithm.kl_ctrl.horizon=5 algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.type=fixed"),
        ("actor.clip_ratio=0.1 algorithm.policy_loss_fn=reinforce", "algorithm.policy_loss_fn=reinforce has no clip"),
        ("actor.clip_ratio_c=off algorithm.policy_loss_fn=reinforce", "algorithm.policy_loss_fn=reinforce has no clip"),
        (
            "actor.clip_ratio=0.1 actor.clip_ratio_low=0.2 actor.clip_ratio_high=0.3",
            "actor.clip_ratio_low and actor.clip_ratio_high are both set",
        ),
        ("actor.loss_scale_factor=5", "actor.loss_agg_mode=token-mean has no constant"),
        ("critic.loss_scale_factor=5", "critic.loss_agg_mode=token-mean has no constant"),
        ("actor.optim.momentum=0.9", "actor.optim.name=adamw has no momentum"),
        ("critic.optim.betas=[0.9,0.9] critic.optim.name=sgd", "critic.optim.name=sgd has no moments"),
        ("actor.optim.beta1=0.9 actor.optim.name=sgd", "actor.optim.name=sgd has no moments"),
        ("actor.optim.min_lr=0", "actor.optim.lr_decay_style=constant never decays"),
        ("rollout.val_kwargs.top_p=0.9 data.val_files=b", "rollout.val_kwargs.temperature=0 is greedy"),
        ("trainer.test_freq=5", "there are no val_files, so nothing is evaluated"),
        ("data.seed=5 data.shuffle=false", "data.shuffle=false"),
        ("trainer.total_epochs=2 trainer.total_training_steps=5", "trainer.total_training_steps=5 decides"),
        ("trainer.node_rank=0", "trainer.nnodes=1"),
        ("sft.epochs=2", "`megarl train` does not read it"),
    ],
)
def test_a_typed_key_that_would_do_nothing_is_refused(words, because):
    first = words.split()[0]
    told = refusal(*words.split(), *(["rollout.n=2"] if "grpo" in words or "groups" in words else []))
    assert told.startswith(f"{first}: has no effect, because {because}")


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
