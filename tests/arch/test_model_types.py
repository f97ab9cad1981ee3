"""Models that Megatron-Core cannot compute are refused by name, with what it lacks and the version that has it."""

import pytest

from megarl.arch.count import check
from megarl.arch.model_types import MISSING
from megarl.mcore.models.families import FAMILIES, family_of


@pytest.mark.parametrize("model_type", MISSING)
def test_a_sentence_says_what_is_missing(model_type: str) -> None:
    for refuse in (family_of, check):
        with pytest.raises(ValueError) as caught:
            refuse({"model_type": model_type})
        said = str(caught.value)
        assert said.startswith(f"config.json: model_type '{model_type}' is not supported: Megatron-Core ")
        assert "\n" not in said and "expected one of" not in said
    assert model_type not in FAMILIES


def test_other_models_are_told_what_there_is() -> None:
    with pytest.raises(ValueError, match=r"model_type 'gpt2' is not supported; expected one of \['deepseek_v3', "):
        family_of({"model_type": "gpt2"})
