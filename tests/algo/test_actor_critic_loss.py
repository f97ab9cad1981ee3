import json
import math
from dataclasses import asdict

import algo_reference as ref
import pytest
import torch
from algo_reference import Packed, packs, random_packed
from hypothesis import given
from hypothesis import strategies as st

from megarl.algo import ActorLoss, CriticLoss, NonFiniteError, token_weights
from megarl.algo.rehearsal import rehearse
from megarl.samples.batch import Batch

D = torch.float64
INPUTS = ("log_probs", "entropy", "full_kl")
KL = ref.KL_ESTIMATORS | {"k1": ref.KL_ESTIMATORS["kl"], "k3": ref.KL_ESTIMATORS["low_var_kl"]}


def weighted(packed: Packed, mode: str = "seq-mean-token-mean") -> Batch:
    batch = packed.batch
    mask = batch.columns["response_mask"]
    return batch.with_columns(
        weight=token_weights(mode, mask, batch.segment_ids, group_ids=batch.per_sequence["group"])
    )


def leaves(batch: Batch, *names: str) -> dict[str, torch.Tensor]:
    return {name: batch.columns[name].clone().requires_grad_() for name in names}


def two_tokens(**columns) -> Batch:
    base = {"weight": [0.0, 0.25, 0.75], "response_mask": [0.0, 1.0, 1.0]} | columns
    tensors = {name: torch.tensor(c, dtype=D) for name, c in base.items()}
    return Batch(torch.zeros(3, dtype=torch.int64), torch.tensor([3]), tensors)


def test_total_by_hand():
    batch = two_tokens(
        old_log_probs=[math.nan, -1.0, -2.0], advantages=[math.nan, 1.0, -1.0], ref_log_probs=[math.nan, -1.5, -2.0]
    )
    outputs = {
        "log_probs": torch.tensor([math.nan, -1.0, -2.0 + math.log(1.1)], dtype=D, requires_grad=True),
        "entropy": torch.tensor([math.nan, 2.0, 4.0], dtype=D, requires_grad=True),
    }
    loss_fn = ActorLoss(entropy_coeff=0.01, use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type="k2")
    out = loss_fn(batch, outputs)
    x = math.log(1.1)
    policy = 0.25 * -1.0 + 0.75 * 1.1
    entropy = 0.25 * 2 + 0.75 * 4
    kl = 0.25 * 0.125 + 0.75 * x * x / 2
    assert out.loss.item() == pytest.approx(policy - 0.01 * entropy + 0.1 * kl)
    out.loss.backward()
    assert outputs["log_probs"].grad.tolist() == pytest.approx([0, 0.25 * (-1 + 0.1 * 0.5), 0.75 * (1.1 + 0.1 * x)])
    assert outputs["entropy"].grad.tolist() == pytest.approx([0.0, -0.0025, -0.0075])

    result = {name: stat.result() for name, stat in out.stats.items()}
    mean = 0.25 + 0.75 * 1.1
    by_hand = {
        "actor/pg_loss": policy,
        "actor/pg_loss_level": -(0.25 * 1.0 + 0.75 * -1.0),
        "actor/drift_good": 0.0,  # its ratio is 1
        "actor/drift_bad": 0.75 * 0.1 * -1.0,
        "actor/pg_clipfrac": 0.0,
        "actor/pg_clipfrac_lower": 0.0,
        "actor/entropy": entropy,
        "actor/kl_loss": kl,
        "actor/ppo_kl": 0.75 * -x,
        "actor/ratio_mean": mean,
        "actor/ratio_std~mean": mean,
        "actor/ratio_std~square": 0.25 + 0.75 * 1.21,
        "actor/ratio_min": 1.0,
        "actor/ratio_max": 1.1,
    }
    assert result == pytest.approx(by_hand)
    assert {s.weight for s in out.stats.values() if s.kind == "mean"} == {1.0}


def test_what_the_ratio_adds_to_an_unclipped_loss_is_its_drift():
    """-mean(A r) = level - drift_good - drift_bad; where advantages add up to 0, the level is 0 too."""
    for weights in (None, "rollout_weight"):
        batch = weighted(random_packed([5, 9, 4, 7], 1))
        loss_fn = ActorLoss("ppo", clip_low=0.999, clip_high=1e6, clip_c="off", use_rollout_weight=weights is not None)
        out = loss_fn(batch, {"log_probs": batch.columns["log_probs"]})
        found = {name: out.stats[f"actor/{name}"].result() for name in ("pg_loss", "pg_loss_level")}
        good, bad = (out.stats[f"actor/drift_{name}"].result() for name in ("good", "bad"))
        assert good != 0 and bad != 0
        assert found["pg_loss"] == pytest.approx(found["pg_loss_level"] - good - bad)


@pytest.mark.parametrize("policy_loss", ref.POLICY_LOSSES)
def test_without_old_log_probs_the_policy_is_the_old_one(policy_loss):
    """To the bit, with the ratio's gradient."""
    fn = actor(policy_loss, ref.POLICY_LOSSES[policy_loss].settings[0], use_kl_loss=True, kl_importance=True)
    batch = weighted(random_packed([3, 5, 4], 7))
    found = []
    for old_names in ((), ("old_log_probs",)):
        outputs = leaves(batch, *INPUTS[:2])
        old = {name: outputs["log_probs"].detach() for name in old_names}
        rest = {name: column for name, column in batch.columns.items() if name != "old_log_probs"}
        out = fn(Batch(batch.tokens, batch.lengths, rest | old, batch.per_sequence), outputs)
        out.loss.backward()
        found.append((out.loss.item(), outputs["log_probs"].grad, out.stats))
    (loss, gradient, stats), (other_loss, other_gradient, other_stats) = found
    assert (loss, stats) == (other_loss, other_stats)
    assert torch.equal(gradient, other_gradient) and gradient.abs().sum() > 0
    assert stats["actor/ratio_min"].result() == stats["actor/ratio_max"].result() == 1
    assert all(stats[f"actor/{name}"].result() == 0 for name in ("ppo_kl", "drift_good", "drift_bad"))


def test_importance_multiplies_the_kl_and_its_gradient_unless_plus_owns_the_gradient():
    batch = two_tokens(old_log_probs=[0, -1.0, -1.0], advantages=[0, 0.0, 0.0], ref_log_probs=[0, -2.0, -3.0])
    new, r = [0.0, -1.5, -1.0], math.exp(-0.5)
    for kind, gradient in (("k1", [0.25 * (r * 0.5 + r), 0.75 * 3.0]), ("k1+", [0.25 * r * 0.5, 0.75 * 2.0])):
        log_probs = torch.tensor(new, dtype=D, requires_grad=True)
        loss_fn = ActorLoss(use_kl_loss=True, kl_loss_coef=1.0, kl_loss_type=kind, kl_importance=True)
        out = loss_fn(batch, {"log_probs": log_probs})
        out.loss.backward()
        assert out.loss.item() == pytest.approx(0.25 * r * 0.5 + 0.75 * 2.0)
        assert log_probs.grad.tolist() == pytest.approx([0.0, *gradient])


def test_full_kl_is_the_models_column():
    batch = two_tokens(old_log_probs=[0, -1.0, -1.0], advantages=[0, 0.0, 0.0], ref_log_probs=[0, -2.0, -3.0])
    for kind, kl_slopes, slopes in (
        ("full", [0.0, 0.25, 0.75], None),
        ("full+", None, [0.0, 0.25 * 0.5, 0.75 * 2.0]),  # value of full, gradient of k2
    ):
        log_probs = torch.tensor([0.0, -1.5, -1.0], dtype=D, requires_grad=True)
        full_kl = torch.tensor([math.nan, 0.4, 0.8], dtype=D, requires_grad=True)
        loss_fn = ActorLoss(use_kl_loss=True, kl_loss_coef=1.0, kl_loss_type=kind)
        assert loss_fn.outputs == ("log_probs", "entropy", "full_kl")
        assert ("ref_log_probs" in loss_fn.columns) == (kind == "full+")
        out = loss_fn(batch, {"log_probs": log_probs, "full_kl": full_kl})
        assert out.loss.item() == pytest.approx(0.25 * 0.4 + 0.75 * 0.8)
        assert out.stats["actor/kl_loss"].result() == pytest.approx(0.7)
        out.loss.backward()
        assert (None if full_kl.grad is None else full_kl.grad.tolist()) == kl_slopes
        if slopes is not None:
            assert log_probs.grad.tolist() == pytest.approx(slopes)


def test_settings_survive_the_way_to_a_rank():
    loss_fn = ActorLoss("sapo", args={"tau_pos": 2.0}, use_kl_loss=True, kl_loss_type="full", use_rollout_weight=True)
    plain = json.loads(json.dumps(asdict(loss_fn)))
    assert ActorLoss(**plain) == loss_fn
    assert CriticLoss(**json.loads(json.dumps(asdict(CriticLoss(None))))) == CriticLoss(None)


def actor(policy_loss, settings, **how) -> ActorLoss:
    """Settings of a reference: its clips are the actor's, None for "off", and the rest are the loss's own."""
    clips = {name: "off" if value is None else value for name, value in settings.items() if "clip_" in name}
    return ActorLoss(policy_loss, args={name: settings[name] for name in settings if name not in clips}, **clips, **how)


# What the policy loss stands beside, in turn over the losses and their settings.
BESIDE = [
    {},
    {"entropy_coeff": 0.01},
    {"use_kl_loss": True, "kl_loss_coef": 0.05},
    {"use_rollout_weight": True},
    {"use_kl_loss": True, "kl_loss_type": "full", "kl_loss_coef": 0.2, "use_rollout_weight": True},
    {"use_kl_loss": True, "kl_loss_type": "k1"},
    {"use_kl_loss": True, "kl_loss_type": "full+"},
    {"use_kl_loss": True, "kl_loss_type": "abs", "kl_loss_coef": 0.5},
    {"use_kl_loss": True, "kl_loss_type": "abs+", "kl_importance": True, "entropy_coeff": -0.1},
    {"use_kl_loss": True, "kl_loss_type": "k3", "kl_loss_coef": 0.5, "kl_importance": True},
]
CASES = [(name, settings) for name, reference in ref.POLICY_LOSSES.items() for settings in reference.settings]
ACTORS = [actor(*case, **BESIDE[i % len(BESIDE)]) for i, case in enumerate([*CASES, *CASES[:3]])]


@given(packs, st.sampled_from(range(len(ACTORS))))
def test_actor_loss_agrees_with_the_slow_reference(packed: Packed, which):
    fn = ACTORS[which]
    batch = weighted(packed)
    total = 0.0
    for b, mask in enumerate(packed.masks):
        cols = {name: packed.lists(name)[b] for name in packed.batch.columns}
        n, num_sequences = sum(mask), sum(any(m) for m in packed.masks)
        live = {name: [x for x, m in zip(column, mask, strict=True) if m] for name, column in cols.items()}
        three = (live["log_probs"], live["old_log_probs"], live["advantages"])
        policy = ref.policy_tokens(fn.policy_loss, *three, selected=live["selected"], **fn.hyperparameters)
        for t, (loss, _) in enumerate(policy):
            new, old = live["log_probs"][t], live["old_log_probs"][t]
            if fn.use_rollout_weight:
                loss *= live["rollout_weight"][t]
            loss -= fn.entropy_coeff * live["entropy"][t]
            if fn.use_kl_loss:
                kind = fn.kl_loss_type.removesuffix("+")
                kl = live["full_kl"][t] if kind == "full" else KL[kind](new - live["ref_log_probs"][t])
                loss += fn.kl_loss_coef * kl * (ref.ratio(new, old) if fn.kl_importance else 1.0)
            total += loss / (n * num_sequences)
    assert fn(batch, leaves(batch, *INPUTS)).loss.item() == pytest.approx(total, rel=1e-10, abs=1e-12)


@pytest.mark.parametrize("loss_fn", ACTORS)
def test_nothing_at_masked_places_reaches_loss_gradient_or_statistics(loss_fn):
    poisoned, plain = (weighted(random_packed([4, 0, 1, 6, 3], 11, poison=p)) for p in (True, False))
    results = []
    for batch in (poisoned, plain):
        outputs = leaves(batch, *INPUTS)
        out = loss_fn(batch, outputs)
        out.loss.backward()
        grads = [x.grad for x in outputs.values() if x.grad is not None]
        results.append((out.loss.detach(), grads, out.stats))
    (loss, grads, stats), (loss_0, grads_0, stats_0) = results
    assert torch.equal(loss, loss_0)
    assert stats == stats_0
    assert all(torch.equal(a, b) for a, b in zip(grads, grads_0, strict=True))
    masked = plain.columns["response_mask"] == 0
    assert all(float(g[masked].abs().sum()) == 0 for g in grads)


@pytest.mark.parametrize("lengths", [[], [3, 0, 1]])
def test_a_step_without_a_trainable_token_is_zero_with_zero_gradients(lengths):
    batch = random_packed(lengths, 2).batch
    zeros = torch.zeros(batch.num_tokens, dtype=D)
    batch = weighted(Packed(batch.with_columns(response_mask=zeros)))
    outputs = leaves(batch, *INPUTS, "values")
    actor = ActorLoss(entropy_coeff=0.1, use_kl_loss=True, kl_loss_type="full")(batch, outputs)
    critic = CriticLoss()(batch, outputs)
    (actor.loss + critic.loss).backward()
    assert (actor.loss.item(), critic.loss.item()) == (0.0, 0.0)
    assert all(x.grad.tolist() == zeros.tolist() for x in outputs.values())
    stats = actor.stats | critic.stats
    assert "actor/ratio_min" not in stats
    assert all(s.weight == 0 and s.result() == 0 for s in stats.values())


def test_half_precision_outputs_are_widened():
    batch = weighted(random_packed([5, 4], 3, dtype=torch.float32))
    log_probs = batch.columns["log_probs"].bfloat16().requires_grad_()
    out = ActorLoss()(batch, {"log_probs": log_probs})
    out.loss.backward()
    assert out.loss.dtype == torch.float32
    assert log_probs.grad.isfinite().all()


@pytest.mark.parametrize(
    ("loss_fn", "column"),
    [(ActorLoss(), name) for name in ("log_probs", "old_log_probs", "advantages", "entropy", "weight")]
    + [(CriticLoss(), name) for name in ("values", "returns")],
)
def test_a_number_that_is_not_finite_names_its_sequence(loss_fn, column):
    packed = random_packed([3, 0, 6, 2], 1, poison=False)
    batch = weighted(Packed(packed.batch.with_columns(response_mask=torch.ones(11, dtype=D))))
    broken = batch.columns[column].clone()
    broken[5] = -math.inf
    batch = batch.with_columns(**{column: broken})
    out = loss_fn(batch, {name: batch.columns[name] for name in (*INPUTS, "values")})
    assert out.loss.isnan() and out.unread.is_bad
    with pytest.raises(NonFiniteError, match=f"{column} is -inf at token 2 of sequence 2 ") as caught:
        _ = out.stats
    assert (caught.value.sequence, caught.value.token, caught.value.column[-len(column) :]) == (2, 2, column)


def test_critic_by_hand():
    batch = two_tokens(values=[math.nan, 1.0, 0.0], returns=[math.nan, 3.0, 1.0])
    values = torch.tensor([math.nan, 2.0, 0.25], dtype=D, requires_grad=True)
    out = CriticLoss(0.5)(batch, {"values": values})
    out.loss.backward()
    # token 1: clipped to 1.5, error 1.5^2;  token 2: error .75^2
    assert out.loss.item() == pytest.approx(0.25 * 0.5 * 2.25 + 0.75 * 0.5 * 0.5625)
    assert values.grad.tolist() == pytest.approx([0.0, 0.0, 0.75 * -0.75])
    result = {name: stat.result() for name, stat in out.stats.items()}
    assert result == pytest.approx(
        {
            "critic/vf_loss": out.loss.item(),
            "critic/vf_clipfrac": 0.25,
            "critic/vpred_mean": 0.25 * 2 + 0.75 * 0.25,
            "critic/vf_explained_var~error_mean": 0.25 * 1 + 0.75 * 0.75,
            "critic/vf_explained_var~error_square": 0.25 * 1 + 0.75 * 0.5625,
            "critic/vf_explained_var~target_mean": 0.25 * 3 + 0.75 * 1,
            "critic/vf_explained_var~target_square": 0.25 * 9 + 0.75 * 1,
        }
    )


def test_columns_and_entropy_follow_the_settings():
    assert ActorLoss().columns == ("weight", "response_mask", "old_log_probs", "advantages")
    assert ActorLoss(use_kl_loss=True).columns[-1] == "ref_log_probs"
    assert ActorLoss(use_kl_loss=True, kl_loss_type="full").columns == ActorLoss().columns
    assert ActorLoss("kl_cov", use_rollout_weight=True).columns[-2:] == ("rollout_weight", "selected")
    assert ActorLoss().outputs == ActorLoss(use_kl_loss=True).outputs == ("log_probs", "entropy")
    assert CriticLoss().outputs == ("values",)
    assert CriticLoss().columns == ("weight", "response_mask", "values", "returns")


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"policy_loss": "ppo2"}, "policy_loss_fn='ppo2': expected one of "),
        ({"policy_loss": "reinforce", "clip_c": "off"}, "actor.clip_ratio_c=off: the policy loss reinforce has no"),
        ({"policy_loss": "reinforce", "clip_low": 0.1}, "actor.clip_ratio_low=0.1"),
        ({"policy_loss": "gspo", "clip_c": 3.0}, "actor.clip_ratio_c=3.0: the policy loss gspo has no such clip"),
        ({"clip_c": 0.5}, "actor.clip_ratio_c=0.5: expected a number above 1, or .off. .algorithm.policy_loss_fn=ppo."),
        ({"clip_low": 1.5}, "actor.clip_ratio_low=1.5, .*: expected 0 <= actor.clip_ratio_low <= 1"),
        ({"args": {"clip_low": 0.1}}, "policy_loss_args.clip_low=0.1: expected actor.clip_ratio_low for a clip"),
        ({"use_kl_loss": True, "kl_loss_type": "k9"}, "KL estimator 'k9': expected one of kl, .*, abs, full"),
        ({"policy_loss": "dro"}, "policy_loss_fn=dro: expected a value in algorithm.policy_loss_args.beta"),
        ({"policy_loss": "dro", "args": {"beta": math.inf}}, "policy_loss_args.beta=inf: expected a finite number"),
        ({"policy_loss": "dro", "args": {"beta": True}}, "policy_loss_args.beta=True: expected a finite number"),
        ({"policy_loss": "sapo", "args": {"tau": 1.0}}, "policy_loss_fn=sapo takes tau_pos, tau_neg"),
        ({"args": {"beta": 1.0}}, "policy_loss_args.beta=1.0: algorithm.policy_loss_fn=ppo takes no values of its own"),
        ({"policy_loss": "clip_cov", "args": {"selected": 1}}, "selected=1: .*=clip_cov takes clip_cov_ratio, .*_lb"),
        ({"policy_loss": "kl_cov", "args": {"kl_cov_ratio": 0}}, "policy_loss_args.kl_cov_ratio=0: expected a number"),
        ({"policy_loss": "clip_cov", "args": {"clip_cov_lb": 5.0, "clip_cov_ub": 1.0}},
         "args.clip_cov_lb=5.0, algorithm.*ub=1.0: expected the first below the second"),
    ],
)  # fmt: skip
def test_settings_that_do_not_fit_are_refused_at_once(settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        rehearse(ActorLoss(**settings))


def test_a_range_of_values_below_zero_is_refused():
    with pytest.raises(ValueError, match="critic.cliprange_value=0: expected a number above 0, or null"):
        CriticLoss(0)
