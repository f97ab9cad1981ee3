"""Models that Megatron-Core cannot compute are refused by name, with what it lacks and the version that has it."""

import pytest

from megarl.arch import model_types
from megarl.arch.model_types import MISSING
from megarl.mcore.models.families import FAMILIES, family_of
from megarl.weights.count import check


@pytest.mark.parametrize("model_type", MISSING)
def test_a_sentence_says_what_is_missing(model_type: str) -> None:
    for refuse in (family_of, check):
        with pytest.raises(ValueError) as caught:
            refuse({"model_type": model_type})
        said = str(caught.value)
        assert said.startswith(f"config.json: model_type '{model_type}' is not supported: ")
        assert "\n" not in said and "expected one of" not in said
    assert model_type not in FAMILIES


@pytest.mark.parametrize("kind", ["qwen3_next", "glm_moe_dsa"])
def test_a_model_that_needs_a_newer_megatron_core_says_so(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(model_types, "version", lambda _: "0.16.1")
    with pytest.raises(ValueError, match=rf"^config.json: model_type '{kind}' needs Megatron-Core 0.19.2, .* has 0.16"):
        family_of({"model_type": kind})
    monkeypatch.setattr(model_types, "version", lambda _: "0.19.2+70e7b2f6")
    family_of({"model_type": kind})


def test_other_models_are_told_what_there_is() -> None:
    with pytest.raises(ValueError, match=r"model_type 'gpt2' is not supported; expected one of \['deepseek_v3', "):
        family_of({"model_type": "gpt2"})


@pytest.mark.parametrize("kind", ["deepseek_v4", "qwen3_vl", "kimi_k25", "glm5_next", "inkling2"])
def test_models_of_this_year_that_cannot_be_trained_are_named_with_the_reason(kind: str) -> None:
    with pytest.raises(ValueError, match=rf"model_type '{kind}' is not supported: .*(Megatron-Core has|vision part)"):
        family_of({"model_type": kind})
