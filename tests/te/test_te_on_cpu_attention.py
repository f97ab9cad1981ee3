"""Transformer-Engine's own filters choose a fused attention for every preset, or the run is refused before it starts.

cuDNN's conditions, which are compiled, are not asked: see `te_attention.get_fused_attn_backend`.
"""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
from preset_files import NAMES, cases_of, hf_of
from te_backends import Question, ask
from te_start import loaded, run
from tiny_models import LACKING

from megarl.arch.layout import Layout, exchange_misfits, numbers_of

pytestmark = [pytest.mark.dist, pytest.mark.full]

PRESETS = [name for name in NAMES if hf_of(name)["model_type"] not in LACKING]
LAYOUTS = {(name, case.layout.tp, case.layout.cp): case for name in PRESETS for case in cases_of(name)}
MISTRAL, GPT_OSS, QWEN, DEEPSEEK = map(hf_of, ("mistral_7b_v0_1", "gpt_oss_20b", "qwen3_8b", "deepseek_v3_671b"))
CP = Layout(cp=2)
OTHERS = {
    "windows, heads exchanged": (Question(MISTRAL, CP, 2), "fused"),
    "windows in a ring": (Question(MISTRAL, CP, 2, exchanges_heads=False), "none"),
    "windows and sinks, heads exchanged": (Question(GPT_OSS, CP, 2), "fused"),
    "windows and sinks in a ring": (Question(GPT_OSS, CP, 2, exchanges_heads=False), "none"),
    "a ring": (Question(QWEN, CP, 2), "fused"),
    "latent attention in a ring": (Question(DEEPSEEK, CP, 2), "fused"),
    "float32": (Question(QWEN, Layout(), dtype=torch.float32), "unfused"),
    "float32 in a ring": (Question(QWEN, CP, 2, dtype=torch.float32), "none"),
}


@pytest.fixture(scope="module")
def chosen() -> dict[str, str]:
    questions = {
        f"{name} tp{tp} cp{cp}": Question(hf_of(name), case.layout, case.num_ranks)
        for (name, tp, cp), case in LAYOUTS.items()
        if not list(exchange_misfits(numbers_of(hf_of(name)), case.layout))
    }
    questions |= {name: question for name, (question, _) in OTHERS.items()}
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        (answers,) = loaded(pool.submit(run, 1, ask, list(questions.values())).result())
    return dict(zip(questions, answers, strict=True))


def test_every_preset_has_a_fused_attention_in_each_of_its_layouts(chosen: dict[str, str]) -> None:
    of_presets = {name: choice for name, choice in chosen.items() if name not in OTHERS}
    assert len(of_presets) >= len(PRESETS)
    assert {name: choice for name, choice in of_presets.items() if choice != "fused"} == {}


@pytest.mark.parametrize("name", OTHERS)
def test_what_has_no_fused_attention_is_what_the_product_refuses(chosen: dict[str, str], name: str) -> None:
    assert chosen[name] == OTHERS[name][1]
