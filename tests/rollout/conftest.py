"""Fixtures: folders of tiny models, and one server that all tests of this room share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tiny_server import SERVERS, Served, make_model
from transformers import Qwen3ForCausalLM

from megarl.rollout.client import Engine


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


@pytest.fixture(scope="session", params=sorted(SERVERS))
def shared_server(
    request: pytest.FixtureRequest, model_path: str, other_path: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    with SERVERS[request.param](model_path, tmp_path_factory.mktemp("logs")) as (url, token):
        yield Served(url, token, model_path, other_path, Engine(url, token, timeout_s=60))


@pytest.fixture
def server(shared_server: Served) -> Iterator[Served]:
    """The shared server, handed back as it was found: running, at version 0 of the first weights, in no session."""
    yield shared_server
    shared_server.engine.abort(everything=True)
    shared_server.engine.resume()
    shared_server.engine.resume_memory()
    if shared_server.engine.model_info()["weight_version"] != "0":
        shared_server.engine.update_from_disk(shared_server.model_path, version=0)
