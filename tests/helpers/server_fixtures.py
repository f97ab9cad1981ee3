"""Fixtures: folders of tiny models, and one server that all tests of a folder share."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
from tiny_server import BOTH, CURRENT, PARAMS, VARIANTS, Served, make_model, running, served_by
from transformers import Qwen3ForCausalLM

from megarl.servers.supervisor import Servers


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model(tmp_path_factory.mktemp("model"), seed=0)


@pytest.fixture(scope="session")
def other_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same architecture with other weights."""
    return make_model(tmp_path_factory.mktemp("other"), seed=1)


@pytest.fixture(scope="session")
def tied_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model(tmp_path_factory.mktemp("tied"), seed=2, tied=True)


@pytest.fixture(scope="session")
def reference(model_path: str) -> Qwen3ForCausalLM:
    """transformers' own forward pass over the served weights."""
    return Qwen3ForCausalLM.from_pretrained(model_path).eval()


@pytest.fixture(scope="session")
def hf_served(model_path: str, other_path: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    variant, logs = VARIANTS["hf"], tmp_path_factory.mktemp("logs")
    with (
        running(variant, model_path, logs) as servers,
        served_by(servers, variant, model_path, other_path, logs) as served,
    ):
        yield served


@pytest.fixture(scope="session")
def sglang_pair(model_path: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """Two servers, which several variants use in turn: a start takes long."""
    with running(VARIANTS["sglang_smg"], model_path, tmp_path_factory.mktemp("sglang_pair")) as servers:
        yield servers


@pytest.fixture(scope="session", params=[PARAMS[name] for name in BOTH])
def any_served(
    request: pytest.FixtureRequest, model_path: str, other_path: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """The servers of one variant after the other."""
    variant, logs = VARIANTS[request.param], tmp_path_factory.mktemp(request.param)
    with ExitStack() as stack:
        if variant.engine == "hf":
            yield request.getfixturevalue("hf_served")
            return
        if (variant.version, variant.tensor_parallel_size) == (CURRENT, 1):
            servers = request.getfixturevalue("sglang_pair")
        else:
            servers = stack.enter_context(running(variant, model_path, logs))
        yield stack.enter_context(served_by(servers, variant, model_path, other_path, logs))


@pytest.fixture
def background() -> Iterator[ThreadPoolExecutor]:
    """Threads that ask while the test goes on."""
    with ThreadPoolExecutor(4) as threads:
        yield threads


@pytest.fixture
def server(hf_served: Served) -> Iterator[Served]:
    """Our own server, handed back as it was found."""
    yield hf_served
    restore(hf_served)


@pytest.fixture
def any_server(any_served: Served) -> Iterator[Served]:
    """The same of every variant."""
    yield any_served
    restore(any_served)


def restore(served: Served) -> None:
    """Running, at version 0 of the first weights, in no session."""
    served.check()
    served.engine.abort(everything=True)
    served.engine.resume()
    if served.variant.engine == "hf":  # stock SGLang dies of a resume without a release
        served.engine.resume_memory()
    for engine in served.engine.engines:
        if engine.model_info()["weight_version"] != "0" or engine.checksums() != served.checksums:
            engine.update_from_disk(served.model_path, version=0)
