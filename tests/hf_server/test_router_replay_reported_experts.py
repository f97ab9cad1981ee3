"""The experts that our own server reports for each token: those of the pass that predicted it."""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hf_engine import body, running
from tiny_models import LACKING, write_model
from transformers import AutoModelForCausalLM, PreTrainedModel

from megarl.arch.model_types import SPARSE_LATENT
from megarl.arch.routed_experts import IndexedKeys, RoutedExperts
from megarl.hf_server.calls import read_call
from megarl.hf_server.model import HFModel
from megarl.hf_server.scheduler import HFEngine
from megarl.rollout.engine_columns import EngineKeys, EngineRoutes
from megarl.rollout.protocol import parse_replies
from megarl.samples.sample import Completion

INDEXED = [family for family in SPARSE_LATENT if family not in LACKING]
FAMILIES = ("qwen3_moe", "mixtral", "deepseek_v3", "minimax_m2", "gpt_oss", *INDEXED)
PROMPT = [7, 8, 9, 10, 11]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root: Path = tmp_path_factory.mktemp("sparse")
    return {family: str(write_model(root / family, family, tied=False)) for family in FAMILIES}


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Other weights of the first family."""
    return str(write_model(tmp_path_factory.mktemp("other") / "model", FAMILIES[0], tied=False, seed=1))


def chosen_by(model: PreTrainedModel, tokens: Sequence[int]) -> np.ndarray:
    """[tokens, layers with experts, experts of a token], sorted: by transformers in one pass over all tokens."""
    noted: list[torch.Tensor] = []
    sparse = [module for module in model.modules() if isinstance(getattr(module, "experts", None), torch.nn.Module)]
    gates = [layer.router if hasattr(layer, "router") else layer.gate for layer in sparse]
    hooks = [gate.register_forward_hook(lambda *call: noted.append(call[2][2])) for gate in gates]
    with torch.no_grad():
        model(input_ids=torch.tensor([list(tokens)]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return np.sort(torch.stack(noted, dim=1).numpy(), axis=-1)


def wanting(prompt: Sequence[int] = PROMPT, n: int = 1, salt: str | None = None, **params: Any) -> dict[str, Any]:
    return body(prompt, n, salt, ignore_eos=True, **params) | {"return_routed_experts": True}


def completions(reply: Any, model: HFModel, num_asked: int = len(PROMPT), n: int = 1) -> list[Completion]:
    assert model.routes is not None
    replies = parse_replies(reply, n, num_asked=num_asked, columns=[EngineRoutes(model.routes)])
    return [parsed.completion for parsed in replies]


def reported(completion: Completion) -> np.ndarray:
    """What the column says of all tokens but the last, which the model never read."""
    column = completion.columns["routed_experts"]
    assert not column[0].any(), "nothing predicted the first token"
    return np.sort(column[1:].astype(np.int64), axis=-1)


def wait_until_written(engine: HFEngine, num_tokens: int) -> None:
    """Until the only request has so many tokens."""
    while not engine.num_running or int(engine._running.column("num_new").min()) < num_tokens:
        time.sleep(0.01)


def reference_of(folder: str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_every_token_has_the_experts_of_a_pass_over_the_whole_sequence(folders: dict[str, str], family: str) -> None:
    """Whatever was prefilled together, decoded, cached or shared."""
    model, reference = HFModel(folders[family], torch.float32, returns_routes=True), reference_of(folders[family])
    assert model.routes == RoutedExperts.of(model.config.to_dict())
    requests = [(PROMPT, 3), (PROMPT[:2], 1), ([*PROMPT, 12, 13], 1), ([20], 1)]
    bodies = [wanting(prompt, n, max_new_tokens=6, sampling_seed=4) for prompt, n in requests]
    with running(model, max_running=4) as (_, answer):
        replies = [answer(bodies), answer(bodies)]
    assert any(item["meta_info"]["cached_tokens"] for item in replies[1][0]), "the second time from the prefix cache"
    for again in replies:
        for (prompt, n), reply in zip(requests, again, strict=True):
            for completion in completions(reply, model, len(prompt), n):
                assert completion.columns["routed_experts"].dtype == np.uint8
                expected = chosen_by(reference, [*prompt, *completion.token_ids])
                assert np.array_equal(reported(completion), expected[:-1])


@pytest.mark.megatron_0_19
@pytest.mark.parametrize("family", SPARSE_LATENT)
def test_every_token_has_the_keys_of_a_pass_over_the_whole_sequence(folders: dict[str, str], family: str) -> None:
    model, reference = HFModel(folders[family], torch.float32, returns_routes=True), reference_of(folders[family])
    keys, noted = IndexedKeys.of(model.config.to_dict()), list[torch.Tensor]()
    assert keys is not None and keys.chosen == 4
    assert keys.layers == ((0, 1, 3) if family == "glm_moe_dsa" else (0, 1, 2, 3))
    asked = wanting(max_new_tokens=6, sampling_seed=4) | {"return_indexer_topk": True}
    with running(model) as (_, answer):
        (reply,) = answer([asked])
    columns = [EngineRoutes(RoutedExperts.of(model.config.to_dict())), EngineKeys(keys)]
    completion = parse_replies(reply, 1, num_asked=len(PROMPT), columns=columns)[0].completion
    for layer in reference.model.layers:
        if layer.self_attn.indexer is not None:
            layer.self_attn.indexer.register_forward_hook(lambda *call: noted.append(call[2][0]))
    with torch.no_grad():
        reference(input_ids=torch.tensor([[*PROMPT, *completion.token_ids]]), use_cache=False)
    expected = torch.stack(noted, dim=1).sort(-1).values[4:-1]  # those before have fewer tokens than are chosen
    found = torch.from_numpy(completion.columns["indexed_keys"].astype(np.int64)).sort(-1).values
    assert torch.equal(found[5:], expected.long())


def test_only_those_behind_what_the_caller_knows_are_sent(folders: dict[str, str]) -> None:
    """It knows three tokens: the third was not read when it was written, so its experts are the first."""
    model = HFModel(folders["mixtral"], torch.float32, returns_routes=True)
    assert model.routes is not None
    routes = EngineRoutes(model.routes)
    asked = {**body(PROMPT, max_new_tokens=4, sampling_seed=4), "return_routed_experts": True}
    with running(model) as (_, answer):
        whole, rest, without = answer([asked, asked | routes.request(num_known=3), body(PROMPT, max_new_tokens=2)])
    assert "columns" not in without["meta_info"], "who does not ask gets none"
    (first,) = completions(whole, model)
    (second,) = parse_replies(rest, 1, num_asked=len(PROMPT), columns=[routes], num_known=3)
    sent = rest["meta_info"]["columns"]["routed_experts"]
    num_tokens = len(PROMPT) + len(first.token_ids)
    assert (sent["start"], sent["shape"][0]) == (3, num_tokens - 3)
    column = second.completion.columns["routed_experts"]
    assert not column[:3].any()
    assert np.array_equal(column[3:], first.columns["routed_experts"][3:])


@pytest.mark.parametrize("start", [-1, len(PROMPT), "2", True, None])
def test_a_start_outside_the_prompt_is_refused(folders: dict[str, str], start: object) -> None:
    model = HFModel(folders["mixtral"], torch.float32, returns_routes=True)
    with pytest.raises(ValueError, match=r"routed_experts_start_len=.*: expected 0 to \d+, a position of the prompt"):
        read_call(wanting(max_new_tokens=2) | {"routed_experts_start_len": start}, model, 100)


def test_a_server_that_does_not_note_them_refuses(folders: dict[str, str], model_path: str) -> None:
    with pytest.raises(ValueError, match="a server started with --enable-return-routed-experts"):
        read_call(wanting(max_new_tokens=2), HFModel(folders["mixtral"], torch.float32), 100)
    with pytest.raises(ValueError, match="its layers have no experts"):
        HFModel(model_path, torch.float32, returns_routes=True)


def test_a_retraction_leaves_the_experts_of_what_was_written_before(folders: dict[str, str], other: str) -> None:
    """Its KV is computed again with newer weights, which choose other experts for the same tokens."""
    model = HFModel(folders["qwen3_moe"], torch.float32, returns_routes=True)
    before, after = reference_of(folders["qwen3_moe"]), reference_of(other)
    with running(model) as (engine, answer), ThreadPoolExecutor(1) as threads:
        engine.decode_sleep_s = 0.01
        asked = threads.submit(answer, [wanting(max_new_tokens=40, sampling_seed=1)])
        wait_until_written(engine, 8)
        engine.run_now(lambda: engine.pause("retract")).result()
        newer = model.read_folder(other)
        engine.run_alone(lambda: engine.load(lambda: model.load_weights(newer), "1", flush=True)).result()
        engine.run_now(engine.resume).result()
        (completion,) = completions(asked.result(), model)
    (first, second) = completion.versions
    assert (first.version, second.version, second.end) == (0, 1, 40)
    tokens = [*PROMPT, *completion.token_ids]
    # The tokens of version 0 were predicted by passes over the tokens before them.
    old, found = len(PROMPT) + first.end - 1, reported(completion)
    expected, recomputed = chosen_by(before, tokens)[:-1], chosen_by(after, tokens)[:-1]
    assert np.array_equal(found[:old], expected[:old])
    assert np.array_equal(found[old:], recomputed[old:])
    assert not np.array_equal(expected[:old], recomputed[:old]), "the newer weights would have chosen others"


@pytest.mark.parametrize("mode", ["abort", "retract"])
def test_what_is_aborted_keeps_the_experts_of_its_tokens(folders: dict[str, str], mode: str) -> None:
    """Also while it waits after a retraction."""
    model, reference = HFModel(folders["mixtral"], torch.float32, returns_routes=True), reference_of(folders["mixtral"])
    with running(model) as (engine, answer), ThreadPoolExecutor(1) as threads:
        engine.decode_sleep_s = 0.01
        asked = threads.submit(answer, [wanting(max_new_tokens=40)])
        wait_until_written(engine, 4)
        engine.run_now(lambda: engine.pause(mode)).result()
        engine.run_now(lambda: engine.abort(lambda row: True)).result()
        (completion,) = completions(asked.result(), model)
    assert completion.finish_reason == "abort"
    assert np.array_equal(reported(completion), chosen_by(reference, [*PROMPT, *completion.token_ids])[:-1])
