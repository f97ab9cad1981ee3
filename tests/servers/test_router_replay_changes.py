"""Real SGLang: requests are retracted, and other weights arrive in the middle of them.

Whatever happens, each token of a completion has the experts of the pass that sampled it.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from chosen_experts import ROUNDING, Reference, worse_by
from safetensors.torch import load_file, save_file
from shared_buckets import in_shared_memory
from states import held, trusted
from tiny_models import read_config
from tiny_server import CURRENT, TOKEN, Served, Variant, served_by, sglang_of

from megarl.arch.routed_experts import RoutedExperts
from megarl.data.examples.tiny import write_tiny_model
from megarl.rollout.continuation import generate_completion
from megarl.rollout.engine_columns import EngineRoutes
from megarl.rollout.pool.pool import EnginePool
from megarl.rollout.protocol import Route, SamplingParams, generate_body, parse_replies
from megarl.rollout.settings import GenerationSettings
from megarl.rollout.wire_columns import ColumnsLost
from megarl.samples.sample import Completion
from megarl.servers.launch import EngineLaunch
from megarl.servers.supervisor import Servers

pytestmark = [pytest.mark.full, pytest.mark.sglang]

KV_TOKENS = 512  # two completions of LONG fit, six of SHORT do not
PROMPTS = [[10 + i, 20, 30 + i, 7] for i in range(6)]
LONG, SHORT = 200, 150
CLOSE = 1e-4  # between log-probs of the same weights
LIMIT_S = 240.0


@dataclass(frozen=True)
class Running:
    """A server of the first weights, and two references: of these, and of those with other routers."""

    server: Served
    routes: EngineRoutes
    references: tuple[Reference, Reference]
    routers: tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]
    version: list[int] = field(default_factory=lambda: [0])  # of the server; an even one is of the first weights

    def push(self, mode: str) -> int:
        """As megarl.weights.push does it; returns the new version."""
        engine, version = self.server.engine.engines[0], self.version[0] + 1
        texts, _bucket = in_shared_memory(self.routers[version % 2])
        engine.pause(mode)
        engine.begin_update()
        engine.update_from_tensor(texts, version=version, flush_cache=mode != "in_place")
        engine.end_update()
        engine.resume()
        self.version[0] = version
        return version

    def passes(
        self, prompt: Sequence[int], completion: Completion, in_flight: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(scores of experts [P + T - 1, L, E], log-probs [T]) of a completion whose KV was kept in every push.

        `in_flight`: tokens that a push found on their way: the weights before it sampled them.
        """
        tokens = [*prompt, *completion.token_ids]
        scores, logits, cache, start = [], [], None, 0
        for span in completion.versions:  # its tokens were predicted by the passes over the tokens before them
            is_last = span is completion.versions[-1]
            end = len(prompt) + span.end - 1 + (0 if is_last else in_flight)
            of_part = self.references[span.version % 2].read(tokens[start:end], cache)
            scores.append(of_part[0])
            logits.append(of_part[1])
            cache, start = of_part[2], end
        log_probs = torch.cat(logits)[len(prompt) - 1 :].log_softmax(-1)
        return torch.cat(scores), log_probs.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]

    def wait_until_in_the_middle(self, num_requests: int) -> None:
        """Until so many requests run, and have written some 15 tokens each."""
        self.wait_for(lambda: self.server.num_running() == num_requests)
        begun = self.server.num_tokens()
        self.wait_for(lambda: self.server.num_tokens() >= begun + 15 * num_requests)

    def wait_for_a_retraction(self, num_requests: int) -> None:
        """Until one of so many requests, which all ran, waits again."""
        self.wait_for(lambda: self.server.num_running() == num_requests)
        self.wait_for(lambda: self.server.num_waiting() > 0)

    @staticmethod
    def wait_for(happens: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not happens():
            assert time.monotonic() < deadline, "it never happened"
            time.sleep(0.005)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folders, routers = [], []
    for number, name in enumerate(("first", "other")):
        folder = write_tiny_model(tmp_path_factory.mktemp(name) / "model", family="qwen3_moe", tied=False)
        weights, g = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(number)
        changed = {key: torch.randn(weights[key].shape, generator=g) * 0.1 for key in weights if ".gate." in key}
        save_file(weights | changed, folder / "model.safetensors", {"format": "pt"})
        folders.append(folder)
        routers.append(changed)
    of, logs = RoutedExperts.of(read_config(folders[0])), tmp_path_factory.mktemp("logs")
    assert of is not None
    launch = EngineLaunch(
        "sglang",
        str(folders[0]),
        max_running_requests=8,
        max_total_tokens=KV_TOKENS,
        random_seed=7,
        returns_routes=True,
        python=sglang_of(CURRENT),
        device="cpu",
    )
    with pytest.MonkeyPatch.context() as patch, Servers([launch], TOKEN, logs) as servers:
        # Of a request that cannot end early SGLang reserves so many tokens, by default all: now it lacks room later.
        patch.setenv("SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION", "1")
        servers.start()
        with served_by(servers, Variant("sglang"), str(folders[0]), str(folders[1]), logs) as served:
            references = Reference(folders[0]), Reference(folders[1])
            yield Running(served, EngineRoutes(of), references, (routers[0], routers[1]))


def params_of(num_tokens: int) -> SamplingParams:
    return SamplingParams(1.0, max_new_tokens=num_tokens, sampling_seed=3, ignore_eos=True)


def assert_of_the_passes_that_sampled(running: Running, prompt: Sequence[int], completion: Completion) -> None:
    """The log-probs tell which weights sampled a token: SGLang gives that in flight the version of the newer ones."""
    for in_flight in (0, 1):
        scores, log_probs = running.passes(prompt, completion, in_flight)
        if (torch.tensor(completion.log_probs) - log_probs).abs().max() < CLOSE:
            assert worse_by(scores, completion).max() < ROUNDING
            return
    pytest.fail(f"the log-probs are of other passes than {completion.versions}")


def written(
    running: Running, prompts: Sequence[list[int]], num_tokens: int, mode: str, wait: Callable[[int], None]
) -> tuple[list[Completion], dict[str, float]]:
    """Completions through a pool, with one push when `wait` returns; and the pool's counters."""
    url = running.server.url

    async def push(pool: EnginePool) -> None:
        await asyncio.to_thread(wait, len(prompts))
        pool.update(held(url))
        pool.update(trusted(url, await asyncio.to_thread(running.push, mode)))

    async def all_of_them() -> tuple[list[Completion], dict[str, float]]:
        how: dict[str, Any] = {"timeout_s": LIMIT_S, "retries": 1000, "rest_s": 0.0, "fenced": True}
        how |= {"salted": mode == "in_place", "columns": [running.routes]}
        async with EnginePool([url], TOKEN, GenerationSettings(**how)) as pool:
            pool.update(trusted(url, running.version[0]))
            tasks = [generate_completion(pool, prompt, params_of(num_tokens)) for prompt in prompts]
            found, _ = await asyncio.gather(asyncio.gather(*tasks), push(pool))
            return found, pool.counters()

    return asyncio.run(all_of_them())


def written_over_a_push(
    running: Running, prompts: Sequence[list[int]], mode: str
) -> tuple[list[Completion], dict[str, float]]:
    """As `written`, again where the push came after a completion had ended: the server is asked how far it is."""
    for _ in range(5):
        found, counters = written(running, prompts, LONG, mode, running.wait_until_in_the_middle)
        if all(len(completion.versions) == 2 for completion in found):
            return found, counters
    pytest.fail("every push came too late")


def test_a_push_in_place_leaves_every_token_the_experts_of_its_weights(running: Running) -> None:
    """Both requests go on with KV, and so with experts, of the weights before."""
    prompts = PROMPTS[:2]
    found, counters = written_over_a_push(running, prompts, "in_place")
    assert (counters["pieces"], counters["wasted_retracted"]) == (2, 0)
    for prompt, completion in zip(prompts, found, strict=True):
        before, after = completion.versions
        assert (before.version + 1, after.end) == (after.version, LONG)
        assert_of_the_passes_that_sampled(running, prompt, completion)
        # If the column had the experts of one pass with the newer weights, this test would see it.
        scores, _, _ = running.references[after.version % 2].read([*prompt, *completion.token_ids][:-1])
        assert worse_by(scores, completion)[: len(prompt) + before.end - 1].median() > 100 * ROUNDING


def test_a_push_that_ends_requests_leaves_what_they_wrote_its_experts(running: Running) -> None:
    """As every push with rollout.ahead=0 or rollout.update=retract: another request goes on, with KV of its own."""
    found, counters = written_over_a_push(running, PROMPTS[:2], "abort")
    assert (counters["pieces"], counters["wasted_retracted"]) == (4, 0)
    for prompt, completion in zip(PROMPTS[:2], found, strict=True):
        before, after = completion.versions
        tokens = [*prompt, *completion.token_ids][:-1]
        parts = [running.references[span.version % 2].read(tokens)[0] for span in (before, after)]
        old = len(prompt) + before.end - 1
        assert worse_by(torch.cat([parts[0][:old], parts[1][old:]]), completion).max() < ROUNDING
        assert worse_by(parts[1], completion)[:old].median() > 100 * ROUNDING


def test_experts_of_a_retracted_request_are_of_another_pass_and_are_not_used(running: Running) -> None:
    """SGLang computes the KV of what it wrote again with the newer weights, and reports the experts of that pass."""
    prompt = PROMPTS[0]
    body = generate_body(prompt, 1, params_of(LONG), "retracted", None, columns=[running.routes])
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(running.server.ask, Route.GENERATE, body)
        running.wait_until_in_the_middle(1)
        version = running.push("retract")
        reply = asked.result(LIMIT_S).json()
    assert reply["meta_info"].pop("num_retractions") == 1
    unnoticed = parse_replies(reply, 1, num_asked=len(prompt), columns=[running.routes])[0].completion
    before, after = unnoticed.versions
    assert (before.version, after.version) == (version - 1, version)
    tokens = [*prompt, *unnoticed.token_ids][:-1]
    assert worse_by(running.references[version % 2].read(tokens)[0], unnoticed).max() < ROUNDING
    scores, _, _ = running.references[(version - 1) % 2].read(tokens)
    assert worse_by(scores, unnoticed)[: len(prompt) + before.end - 1].median() > 100 * ROUNDING
    reply["meta_info"]["num_retractions"] = 1
    with pytest.raises(ColumnsLost, match="retracted, and reports the experts of another pass"):
        parse_replies(reply, 1, num_asked=len(prompt), columns=[running.routes])


def test_requests_without_room_in_the_kv_cache_are_written_again(running: Running) -> None:
    """SGLang retracts some of six; then other weights arrive, with which it computes their KV again."""
    found, counters = written(running, PROMPTS, SHORT, "in_place", running.wait_for_a_retraction)
    assert counters["wasted_retracted"] > 0
    assert {span.version for completion in found for span in completion.versions} >= {running.version[0]}
    for prompt, completion in zip(PROMPTS, found, strict=True):
        assert len(completion.token_ids) == SHORT
        assert_of_the_passes_that_sampled(running, prompt, completion)
