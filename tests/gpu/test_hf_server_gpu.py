"""On a real GPU: the hf server says what it says on a CPU, takes weights by CUDA IPC, and gives its memory back."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file
from tiny_server import TOKEN, make_model
from wire import parse_completions

from megarl.data.examples.sizes import TinySizes
from megarl.data.examples.tiny import write_tiny_model
from megarl.rollout.client import ServerClient
from megarl.rollout.protocol import Route, SamplingParams, auth_headers, generate_body
from megarl.samples.sample import Completion
from megarl.servers.launch import EngineLaunch
from megarl.servers.supervisor import Servers
from megarl.weights.push.buckets import Bucket
from megarl.weights.push.shared import payload
from megarl.weights.verify.digests import digest

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
PROMPT = [5, 9, 3, 20, 7, 7, 12, 30, 2, 4]
BIG = TinySizes(hidden=1024, layers=4, heads=16, kv_heads=16, head_dim=64, ffn=4096)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """One architecture with two sets of weights."""
    return [make_model(tmp_path_factory.mktemp(f"model_{seed}"), seed=seed) for seed in (0, 1)]


@pytest.fixture(scope="module")
def urls(folders: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A server on the CPU and one on GPU 0, of the first weights in float32."""
    launches = [
        EngineLaunch("hf", folders[0], max_running_requests=64, random_seed=7, device=device, first_gpu=0)
        for device in ("cpu", "cuda")
    ]
    with Servers(launches, TOKEN, tmp_path_factory.mktemp("logs")) as servers:
        servers.start()
        yield dict(zip(("cpu", "cuda"), servers.urls, strict=True))


@pytest.fixture
def clients(urls: dict[str, str]) -> Iterator[dict[str, ServerClient]]:
    made = {device: ServerClient(url, TOKEN) for device, url in urls.items()}
    yield made
    for client in made.values():
        client.close()


def completions(url: str, n: int, **params: Any) -> list[Completion]:
    body = generate_body(PROMPT, n, SamplingParams(max_new_tokens=40, ignore_eos=True, **params), rid="r")
    reply = httpx.post(url + Route.GENERATE, json=body, headers=auth_headers(TOKEN), timeout=120, trust_env=False)
    assert reply.status_code == 200, reply.text
    return parse_completions(reply.json(), n)


def test_it_says_on_which_gpu_it_is(clients: dict[str, ServerClient]) -> None:
    found = {name: client.server_info() for name, client in clients.items()}
    assert {name: info["device"] for name, info in found.items()} == {"cpu": "cpu", "cuda": "cuda"}
    assert found["cuda"]["base_gpu_id"] == 0


def test_log_probs_are_those_of_the_cpu(urls: dict[str, str], clients: dict[str, ServerClient]) -> None:
    """Float32 on both, without TF32, which torch leaves off."""
    on_cpu, on_gpu = (clients[device].prompt_log_probs(PROMPT) for device in ("cpu", "cuda"))
    assert on_gpu == pytest.approx(on_cpu, abs=1e-4)
    greedy = {device: completions(url, 1, temperature=0.0)[0] for device, url in urls.items()}
    assert greedy["cuda"].token_ids == greedy["cpu"].token_ids
    assert greedy["cuda"].log_probs == pytest.approx(greedy["cpu"].log_probs, abs=1e-4)


@pytest.mark.parametrize("params", [{}, {"temperature": 0.7, "top_p": 0.8}, {"top_k": 5}])
def test_a_seed_draws_the_same_again(urls: dict[str, str], params: dict[str, Any]) -> None:
    first, again = (completions(urls["cuda"], 8, sampling_seed=3, **params) for _ in range(2))
    assert [c.token_ids for c in first] == [c.token_ids for c in again]
    assert len({tuple(c.token_ids) for c in first}) > 1


def push(client: ServerClient, tensors: dict[str, torch.Tensor], version: int) -> None:
    """All tensors as one bucket in this process' GPU memory."""
    raw = [tensor.reshape(-1).view(torch.uint8) for tensor in tensors.values()]
    (dtype,) = {tensor.dtype for tensor in tensors.values()}
    bucket = Bucket(list(tensors), [tuple(t.shape) for t in tensors.values()], dtype, torch.cat(raw), True)
    torch.cuda.synchronize()
    client.begin_update()
    client.update_from_tensor([payload(bucket)], version=version)
    client.end_update()


def on_gpu(folder: str) -> dict[str, torch.Tensor]:
    return {name: tensor.cuda() for name, tensor in load_file(f"{folder}/model.safetensors").items()}


def digests(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    return {name: digest(tensor, "words") for name, tensor in tensors.items()}


def test_weights_in_another_process_gpu_memory_are_what_it_then_holds(
    clients: dict[str, ServerClient], folders: list[str]
) -> None:
    client, before = clients["cuda"], clients["cuda"].prompt_log_probs(PROMPT)
    for version, folder in ((1, folders[1]), (2, folders[0])):
        tensors = on_gpu(folder)
        push(client, tensors, version)
        assert client.checksums() == digests(tensors)
        assert (client.prompt_log_probs(PROMPT) == pytest.approx(before, abs=1e-6)) == (folder == folders[0])
    assert client.model_info()["weight_version"] == "2"


def test_sleep_gives_the_memory_back_and_a_push_wakes_it(tmp_path: Path) -> None:
    """67 million parameters; weights and KV cache leave the GPU, and after a push it says what it said before."""
    write_tiny_model(tmp_path / "big", BIG, seed=1)
    launch = EngineLaunch("hf", str(tmp_path / "big"), device="cuda", first_gpu=0, memory_fraction=0.2)
    with Servers([launch], TOKEN, tmp_path / "logs") as servers:
        servers.start()
        client, tensors = ServerClient(servers.urls[0], TOKEN), on_gpu(str(tmp_path / "big"))
        weights = sum(tensor.nbytes for tensor in tensors.values())
        assert weights > 2e8
        before, held = completions(servers.urls[0], 4, temperature=0.0)[0], client.checksums()
        awake = torch.cuda.mem_get_info()[0]
        client.pause("abort")
        client.wait_until_idle()
        client.release_memory()
        asleep = torch.cuda.mem_get_info()[0]
        assert asleep - awake > 0.9 * weights
        client.resume_memory(["weights"])
        push(client, tensors, version=1)
        assert client.checksums() == held == digests(tensors)
        client.resume_memory(["kv_cache", "cuda_graph"])
        client.resume()
        again = completions(servers.urls[0], 4, temperature=0.0)[0]
        assert again.token_ids == before.token_ids
        assert again.log_probs == pytest.approx(before.log_probs, abs=1e-6)
        client.close()
