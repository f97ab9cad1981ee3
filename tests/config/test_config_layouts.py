"""Roles over ranks: each impossible combination is one sentence, and the layouts that it names pass the checks."""

import json
import re
from copy import deepcopy

import pytest
import yaml
from config_helpers import BASE, DENSE, EXPERTS, load, refusal, refusals
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.config import Config, ConfigError, load_config, resolved
from megarl.config.validate.layouts import divisors, failing_roles, layout_faults, nearest_numbers

ON_8 = ("trainer.n_gpus_per_node=8", "rollout.n=2")
ACTOR = "actor.megatron"

# Short names of the keys, for the tests below.
KEYS = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
    "first": "num_layers_in_first_pipeline_stage",
    "last": "num_layers_in_last_pipeline_stage",
    "sp": "sequence_parallel",
    "recompute_granularity": "recompute_granularity",
    "recompute_method": "recompute_method",
    "recompute_num_layers": "recompute_num_layers",
}


def words(text: str, role: str = "actor") -> list[str]:
    """Example: "tp=2 pp=4" -> ["actor.megatron.tensor_model_parallel_size=2", ...]; whole keys stay as they are."""
    pairs = [word.split("=", 1) for word in text.split()]
    return [f"{role}.megatron.{KEYS[key]}={value}" if key in KEYS else f"{key}={value}" for key, value in pairs]


def short(text: str) -> str:
    """A sentence with the short names."""
    for key, name in KEYS.items():
        text = re.sub(rf"(?<![\w]){name}\b", key, text)
    return text


def named(sentence: str) -> list[list[str]]:
    """The layouts that a refusal names, as words to type."""
    _, found, tail = sentence.partition("; nearest: ")
    return [near.split() for near in tail.split(", or ")] if found else []


# Layers 1, 2, 6 and 10 of 12 choose their keys.
KINDS = ",".join("shared" if max(layer - 1, 0) % 4 else "full" for layer in range(12))
GLM = f"model.config={{num_hidden_layers:12,index_topk:8,indexer_types:[{KINDS}]}}"
# Words and sentences have the short names, and no actor.megatron.
IMPOSSIBLE = """
@dense tp=3 | tp=3 does not divide the model's num_attention_heads=8; nearest: tp=4, or tp=2, or tp=8
@dense pp=8 | pp=8 does not divide the model's num_hidden_layers=12; nearest: pp=4, or last=5, or
@dense pp=4 vpp=2 | vpp=2 does not divide the 3 layers of a pipeline rank
@dense pp=4 first=4 | first=4: 8 of the model's num_hidden_layers=12 are left for the other 3 pipeline
@dense vpp=2 | vpp=2: there is one pipeline rank; expected pp above 1, or null or 1
@dense first=6 | first=6: there is one pipeline rank; expected pp above 1, or null
@dense ep=2 | ep=2: the model has no experts; expected 1; nearest: ep=1
@dense tp=2 etp=1 | etp=1: the model has no experts; expected 2, as tp
@dense sp=true | sp=true: expected tp above 1, or false; nearest: sp=false
@experts ep=3 | ep=3 does not divide the model's number of experts=8
@experts etp=5 | etp=5 does not divide the model's intermediate size of an expert=24
@experts tp=2 | sp=false: a model with experts is trained over tp=2 in no other way; expected true; nearest: sp=true, \
or tp=1
tp=3 pp=2 | tp=3: tp*pp*cp = 3*2*1 = 6 does not divide 8 ranks of the actor
cp=5 | cp=5: tp*pp*cp = 1*1*5 = 5 does not divide 8 ranks of the actor
tp=2 ep=8 | ep=8: ep*etp*pp = 8*2*1 = 16 does not divide 8 ranks of the actor
data.train_batch_size=3 | actor.ppo_mini_batch_size=3: 6 sequences cannot keep 8 data-parallel ranks of the actor \
busy; expected at least 4; nearest: tp=2, or
@dense pp=4 recompute_granularity=full recompute_method=uniform recompute_num_layers=2 | recompute_num_layers=2: \
recompute_method=uniform cuts the 3 layers of a stage; expected 3 or 1
@glm pp=2 | pp=2: a chunk would begin with layer 7 of 12, which takes over the keys chosen before it; expected one \
that chooses its own; nearest: pp=1, or first=5, or first=9
@glm pp=4 | pp=4: a chunk would begin with layer 4 of 12
pp=2 actor.strategy=fsdp | pp=2: actor.strategy=fsdp has no pipeline; expected 1; nearest: pp=1
@experts ep=8 actor.strategy=fsdp | ep=8: actor.strategy=fsdp needs two ranks that share each expert; nearest: ep=4
"""


@pytest.mark.parametrize("row", IMPOSSIBLE.strip().splitlines())
def test_a_layout_that_cannot_be_is_told_with_the_nearest_that_can(row: str) -> None:
    typed, told = row.replace("@dense", DENSE).replace("@experts", EXPERTS).replace("@glm", GLM).split(" | ")
    base = [*ON_8, *words(typed)]
    sentence = refusal(*base)
    assert told in short(sentence).replace(f"{ACTOR}.", "")
    assert named(sentence), sentence
    for near in named(sentence):
        load(*base, *near)


def test_an_odd_number_of_layers_is_cut_by_a_shorter_last_stage() -> None:
    deepseek = "model.config={num_hidden_layers:61,num_attention_heads:128}"
    sentence = refusal(*ON_8, deepseek, *words("pp=4"))
    assert f"{ACTOR}.num_layers_in_last_pipeline_stage=13" in named(sentence)[0] + named(sentence)[1]
    load(*ON_8, deepseek, *words("pp=4 last=13"))


def test_a_layout_is_named_only_if_it_suits_the_roles_that_follow() -> None:
    critic = ("critic.model.path=n", "critic.model.config={num_attention_heads:2}")
    sentence = refusal(*ON_8, DENSE, *critic, *words("tp=3"))
    assert short(sentence).endswith("nearest: actor.megatron.tp=2, or actor.megatron.tp=1")
    own = words("tp=3", "critic")
    of_actor, of_critic = refusals(*ON_8, DENSE, *critic, *words("tp=5"), *own)
    assert "nearest: actor.megatron.tp=4, or " in short(of_actor)
    assert short(of_critic).endswith("nearest: critic.megatron.tp=2, or critic.megatron.tp=1")


def test_the_ranks_of_a_role_are_what_its_layout_must_divide() -> None:
    assert "tp*pp*cp = 8*1*1 = 8 does not divide 4 ranks of the critic" in refusal(
        *ON_8, "critic.num_ranks=4", *words("tp=8", "critic")
    )


def test_the_critic_follows_the_cut_of_a_pipeline_only_where_it_has_one() -> None:
    config = load(*ON_8, DENSE, *words("pp=4 first=2 last=2 tp=2"), *words("pp=2", "critic"))
    assert config.critic.megatron.num_layers_in_first_pipeline_stage is None
    assert config.ref.megatron.num_layers_in_first_pipeline_stage == 2
    assert resolved(config) == config
    one = load(*ON_8, DENSE, *words("pp=2 vpp=3"), *words("pp=1", "critic"))
    assert one.critic.megatron.virtual_pipeline_model_parallel_size is None
    assert one.ref.megatron.virtual_pipeline_model_parallel_size == 3


def test_a_role_that_is_not_there_is_not_asked() -> None:
    load(*ON_8, DENSE, "algorithm.adv_estimator=grpo", *words("tp=4"))
    with pytest.raises(ConfigError, match="does not divide"):
        load_config([*BASE, *ON_8, DENSE, *words("tp=3", "critic")])
    load_config(["sft.train_files=[a]", "model.path=m", DENSE, "trainer.n_gpus_per_node=4"], command="sft")


def test_sft_asks_for_a_batch_that_feeds_every_replica() -> None:
    with pytest.raises(ConfigError, match=r"^sft.batch_size=2: 2 sequences cannot keep 4 data-parallel ranks"):
        load_config(
            ["sft.train_files=[a]", "model.path=m", "trainer.n_gpus_per_node=4", "sft.batch_size=2"], command="sft"
        )


def test_a_node_that_only_joins_asks_for_nothing_but_its_place() -> None:
    config, _ = load_config(["trainer.nnodes=2", "trainer.node_rank=1", *words("tp=64")], command="node")
    assert config.trainer.node_rank == 1
    with pytest.raises(ConfigError, match=r"^trainer.node_rank=2: expected less than trainer.nnodes=2"):
        load_config(["trainer.nnodes=2", "trainer.node_rank=2"], command="node")


# ---- how a role is computed


def test_choices_that_change_no_result_are_taken() -> None:
    config = load(
        *ON_8, DENSE, *words("tp=2"), "actor.megatron.pipeline_model_parallel_size=2",
        "actor.megatron.sequence_parallel=true", "actor.megatron.recompute_granularity=full",
        "actor.megatron.recompute_method=uniform", "actor.megatron.recompute_num_layers=3",
        "actor.megatron.use_distributed_optimizer=true", "actor.megatron.overlap_grad_reduce=true",
        "actor.megatron.overlap_param_gather=true", "actor.megatron.param_offload=true",
        "actor.megatron.optimizer_offload=true", "actor.megatron.transformer_impl=local",
    )  # fmt: skip
    assert config.critic.megatron.recompute_method == "uniform", "the critic follows"
    assert load(*ON_8, "actor.use_kl_loss=true", "actor.kl_loss_type=full", *words("tp=2")).ref.megatron


def test_deepep_is_taken_for_experts_on_several_ranks_and_the_reference_follows() -> None:
    words = ("actor.megatron.moe_token_dispatcher_type=flex", "actor.megatron.expert_model_parallel_size=2")
    config = load(*ON_8, EXPERTS, *words, "model.dtype=bfloat16")
    assert config.ref.megatron.moe_token_dispatcher_type == "flex"


def test_where_nothing_can_be_sharded_fsdp_is_megatron() -> None:
    config, warnings = load_config([*BASE, "trainer.n_gpus_per_node=2", *words("tp=2"), "critic.strategy=fsdp"])
    assert config.critic.strategy == "megatron"
    assert warnings == ["critic.strategy=fsdp: no two ranks share a parameter that could be sharded; runs as megatron"]
    assert load(*ON_8, "actor.megatron.context_parallel_size=8", "actor.strategy=fsdp").critic.strategy == "fsdp"


def test_experts_that_lie_over_fewer_ranks_than_the_rest_have_copies() -> None:
    layout = ["tensor_model_parallel_size=4", "expert_model_parallel_size=2", "expert_tensor_parallel_size=1"]
    words = [f"actor.megatron.{word}" for word in (*layout, "sequence_parallel=true", "overlap_grad_reduce=true")]
    assert load(EXPERTS, *words, "trainer.n_gpus_per_node=4").actor.megatron.overlap_grad_reduce


# ---- any layout of any model

SIZES = st.sampled_from([1, 2, 3, 4, 6, 8])


@st.composite
def models(draw: st.DrawFn) -> dict[str, int]:
    heads = draw(st.sampled_from([4, 6, 8, 12, 16]))
    numbers = {
        "num_hidden_layers": draw(st.integers(2, 13)),
        "num_attention_heads": heads,
        "num_key_value_heads": draw(st.sampled_from(divisors(heads))),
        "intermediate_size": draw(st.sampled_from([48, 64, 100])),
        "vocab_size": draw(st.integers(50, 60)),
    }
    if draw(st.booleans()):
        numbers |= {"num_experts": draw(st.sampled_from([4, 6, 8])), "moe_intermediate_size": 24}
    return numbers


@st.composite
def layouts(draw: st.DrawFn) -> dict[str, int | bool]:
    chosen: dict[str, int | bool] = {"tp": draw(SIZES), "pp": draw(SIZES), "cp": draw(SIZES)}
    for key in ("vpp", "ep", "etp", "first", "last"):
        if draw(st.integers(0, 3)) == 0:
            chosen[key] = draw(SIZES)
    chosen["sp"] = draw(st.booleans())
    return chosen


def divides(numbers: dict[str, int], config: Config) -> None:
    """What the checks promise, written out."""
    layout, num_ranks = config.actor.megatron, config.trainer.num_ranks
    tp, pp, cp = (getattr(layout, KEYS[key]) for key in ("tp", "pp", "cp"))
    ep, vpp = (getattr(layout, KEYS[key]) or 1 for key in ("ep", "vpp"))
    etp = layout.expert_tensor_parallel_size or tp
    assert num_ranks % (tp * pp * cp) == num_ranks % (ep * etp * pp) == 0
    assert config.data.train_batch_size >= num_ranks // (tp * pp * cp)
    for name in ("num_attention_heads", "intermediate_size"):
        assert numbers[name] % tp == 0
    assert numbers["num_key_value_heads"] % tp == 0 or tp % numbers["num_key_value_heads"] == 0
    if "num_experts" in numbers:
        assert numbers["num_experts"] % ep == numbers["moe_intermediate_size"] % etp == 0
        assert tp == 1 or layout.sequence_parallel
        assert ep > 1 or etp == tp
    else:
        assert ep == 1
    assert not (layout.sequence_parallel and tp == 1)
    layers, ends = numbers["num_hidden_layers"], (getattr(layout, KEYS["first"]), getattr(layout, KEYS["last"]))
    uneven = [stage for stage in ends if stage is not None]
    others = pp - len(uneven)
    rest = layers - sum(uneven)
    stages = [*uneven, *([rest // others] * others if others else [])]
    assert sum(stages) == layers
    assert len(stages) == pp
    assert all(stage % vpp == 0 and stage > 0 for stage in stages)
    assert pp > 1 or vpp == 1


PLAIN = resolved(Config())


def with_words(config: Config, words: list[str]) -> Config:
    """The configuration with these words typed as well, as all three roles follow the actor."""
    changed = deepcopy(config)
    for word in words:
        key, value = word.removeprefix("actor.megatron.").split("=")
        for role in (changed.actor, changed.critic, changed.ref):
            setattr(role.megatron, key, yaml.safe_load(value))
    return changed


def check(config: Config) -> None:
    def trial(words: list[str]) -> set[str]:
        return failing_roles(with_words(config, words), "train")

    if faults := list(layout_faults(config, "train", trial)):
        raise ConfigError(*faults)


@settings(max_examples=100)
@given(models(), layouts(), st.sampled_from([1, 2, 4, 6, 8, 12, 16, 24]), st.sampled_from([1, 4, 32]))
def test_a_layout_that_passes_divides_everywhere_and_those_named_otherwise_pass(
    numbers: dict[str, int], layout: dict[str, int | bool], num_ranks: int, prompts: int
) -> None:
    config = with_words(PLAIN, words(" ".join(f"{key}={str(value).lower()}" for key, value in layout.items())))
    config.model.config = config.critic.model.config = numbers
    config.trainer.n_gpus_per_node = config.actor.num_ranks = config.critic.num_ranks = num_ranks
    config.data.train_batch_size = config.actor.ppo_mini_batch_size = config.critic.ppo_mini_batch_size = prompts
    try:
        check(config)
    except ConfigError as error:
        assert "\n" not in str(error)
        near = named(str(error))
        assert near, error
        for other in near:
            check(with_words(config, other))
            divides(numbers, with_words(config, other))
        return
    divides(numbers, config)


def test_a_stage_without_experts_is_refused_before_anything_starts() -> None:
    """Layers 0 to 5 of 12 are dense: half a pipeline of them has no experts to deal."""
    half = f"{EXPERTS[:-1]},mlp_only_layers:[0,1,2,3,4,5]}}"
    told = refusal(half, *ON_8, *words("pp=2 ep=2"))
    assert told.startswith(
        f"{ACTOR}.pipeline_model_parallel_size=2: stage 0 would hold no experts, which expert_model_parallel_size=2 "
        "does not train; expected fewer stages, or 1; nearest: "
    )
    for other in named(told):
        load(half, *ON_8, *words("pp=2 ep=2"), *other)
    load(half, *ON_8, *words("pp=2"))
    load(EXPERTS, *ON_8, *words("pp=2 ep=2"))


def test_numbers_that_are_near_are_so_by_their_ratio() -> None:
    assert nearest_numbers(100, divisors(256)) == [128, 64]
    assert nearest_numbers(3, [1, 2, 4, 8], 3) == [4, 2, 8]


def test_a_reward_model_on_ranks_is_laid_out_by_ref_and_must_fit_there(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": 3, "num_hidden_layers": 2}))
    words = ("reward.fn=[exact,model]", f"reward.model.path={tmp_path}", "reward.model.engine=megatron")
    assert load(*words, "ref.num_ranks=2", "trainer.n_gpus_per_node=2").ref.num_ranks == 2
    told = refusal(*words, "ref.megatron.tensor_model_parallel_size=2", "trainer.n_gpus_per_node=2")
    assert told == (
        "ref.megatron.tensor_model_parallel_size=2 does not divide the model's num_attention_heads=3; ref.* lays out "
        f"reward.model.path={tmp_path}; nearest: ref.megatron.tensor_model_parallel_size=1"
    )


def test_an_evaluation_without_the_reward_model_on_ranks_is_announced(tmp_path):
    words = ("reward.fn=[exact,model]", f"reward.model.path={tmp_path}", "reward.model.engine=megatron")
    _, warnings = load_config([*BASE, *words, "data.val_files=[b.jsonl]"])
    assert warnings == ["reward.model.engine=megatron: it scores what is trained on only, so val/score leaves it out"]
    told = refusal(*words, "data.val_files=[b.jsonl]", command="evaluate")
    assert told.startswith("reward.model.engine=megatron: `megarl evaluate` has no ranks")
