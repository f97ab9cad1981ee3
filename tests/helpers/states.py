"""The states of servers that tests publish."""

from megarl.rollout.server_states import Phase, ServerState


def trusted(url: str, version: int, adapter: str | None = None) -> ServerState:
    return ServerState(url, Phase.GENERATING, version, adapter)


def held(url: str) -> ServerState:
    return ServerState(url, Phase.HELD)


def fenced(url: str) -> ServerState:
    return ServerState(url, Phase.FENCED)
