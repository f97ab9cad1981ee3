"""Fixtures of servers, for the tests of this folder."""

from server_fixtures import (  # noqa: F401
    any_served,
    any_server,
    hf_served,
    model_path,
    other_path,
    reference,
    server,
    sglang_pair,
    tied_path,
)
