"""What requests carry beside a conversation: one table of what the endpoint does with each field.

The checks, their sentences, the names of agent.ignore and docs/agent_requests.md are made from it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megarl.agents.refusals import GOES_ON, Refused, shown

# The APIs; `sampling` is the object `sampling_params` of requests for ids.
CHAT, RESPONSES, MESSAGES, TEXT = "chat", "responses", "messages", "text"
IDS, SAMPLING = "ids", "sampling"
# read: as the API says.  served: it changes nothing of the policy.  after: done after sampling, or not enforced; said
# once.  run: other values than the run's are refused, or replaced where agent.ignore has the name.  none: refused.
READ, SERVED, AFTER, RUN, NONE = "read", "served", "after", "run", "none"

# rule | APIs, empty: all | names | values that need no word | what is done, or why it is refused
TABLE = """
read | chat messages | messages | | texts, tool calls and their results; a system message may stand anywhere
read | responses | input | | the same as items; `item_reference` names an item of this episode
read | responses | previous_response_id | | what was said until that answer of this episode comes first
read | responses | instructions | | a system message
read | messages | system | | a system message
read | text | prompt | | text, or token ids
read | ids | token_ids | | the prompt
read | ids | sampling_params | | an object with further fields of this table
read | chat responses messages | tools | | functions, those of a namespace as `NAMESPACE__NAME`; with `defer_loading` \
a tool stands in the result that names it; other kinds, such as web_search, are left out, which is said once
read | chat messages text sampling | max_tokens | | tokens of this answer
read | chat | max_completion_tokens | | tokens of this answer
read | responses | max_output_tokens | | tokens of this answer
read | chat text sampling | n | | answers to the same prompt
read | chat responses messages text | stream | | the whole answer as events
read | chat responses text | stream_options | | `include_usage`
read | chat sampling | logprobs | | of the tokens that were sampled
read | chat text | return_token_ids | | ids of the prompt and the answer, and the weights' versions
read | sampling | stop_token_ids | | tokens that end the answer, too
read | sampling | skip_special_tokens spaces_between_special_tokens | | ids are not changed
served | | reasoning_effort reasoning thinking verbosity | | the model thinks and writes as it has learnt
served | | prediction speed | | hints for speed
served | | truncation | | nothing is cut: a prompt that is too long is refused
served | | user metadata client_metadata service_tier safety_identifier inference_geo | | for a provider's accounts
served | | store prompt_cache_key prompt_cache_retention cache_control | | for a provider's caches
after | chat text | stop | [[], ""] | the agent reads the answer up to it; all that was sampled is recorded
after | messages | stop_sequences | [[]] | the agent reads the answer up to it; all that was sampled is recorded
after | chat responses | parallel_tool_calls | [true] | the agent reads the first call; all that was sampled is recorded
after | chat responses messages | tool_choice | ["auto", "none", {"type": "auto"}, {"type": "none"}] | \
a call is not enforced: the model has to learn it; with `disable_parallel_tool_use` the agent reads the first call
after | chat | response_format | [{"type": "text"}] | the form is not enforced: the model has to learn it
after | responses | text | [{}, {"format": {"type": "text"}}] | the form is not enforced: the model has to learn it
after | messages | output_config output_format | [{}] | the form is not enforced: the model has to learn it
after | chat | web_search_options | | there is no search: the model answers alone
run | | temperature top_p top_k | | the run samples with {name}={run}, and the log-probs of other values would not be \
those of the policy
run | | min_p presence_penalty frequency_penalty | [0] | it would change what is sampled, and the log-probs would not \
be those of the policy
run | | repetition_penalty | [1] | it would change what is sampled, and the log-probs would not be those of the policy
run | | logit_bias | [{}] | it would change what is sampled, and the log-probs would not be those of the policy
run | | seed | | the run draws a seed for each answer itself
run | chat responses messages text ids | model | | this endpoint serves {run} alone
run | chat responses messages | chat_template_kwargs | [{}] | the variables of the run's template are {run}
run | messages | context_management | [{}, {"edits": []}] | the history stays as the agent sends it
run | chat responses | top_logprobs | [0] | there are log-probs of sampled tokens alone
none | responses | include | [[]] | this endpoint does not serve it
none | responses | background | [false] | this endpoint does not serve it
none | chat | modalities | [["text"]] | the model writes text alone
none | text | best_of | [1] | it would choose among answers, and all are recorded
none | text | echo | [false] | this endpoint does not serve it
none | text | suffix | [""] | this endpoint does not serve it
none | messages | mcp_servers | [[]] | tools run where the agent runs
none | messages | thread | | each request brings its whole conversation
"""


@dataclass(frozen=True)
class Field:
    """`taken`: values that need no word; `does`: what is done with others, or why they are refused."""

    name: str
    rule: str
    apis: tuple[str, ...]
    taken: tuple[Any, ...]
    does: str


def _fields() -> dict[str, Field]:
    found = {}
    for line in TABLE.strip().splitlines():
        rule, apis, names, taken, does = (cell.strip() for cell in line.split("|", 4))
        for name in names.split():
            found[name] = Field(name, rule, tuple(apis.split()), tuple(json.loads(taken or "[]")), does)
    return found


FIELDS = _fields()
# Errors of these fields have a status or a code of their own, by which clients go on.
_STATUS = {"model": 404}
_CODES = {"model": "model_not_found", "thread": GOES_ON}

RunValues = Mapping[str, Sequence[Any]]  # fields of the rule `run` -> the values that the run takes; its own first


def check_fields(body: Mapping[str, Any], api: str, run: RunValues, ignore: Collection[str] = ()) -> dict[str, str]:
    """What is to be said of the fields of a request, by their names.  `ignore`: those that the run's values replace.

    null is always allowed.  Raises Refused with one sentence for a field that cannot be served.
    """
    said = {}
    for name, value in body.items():
        field = FIELDS.get(name)
        if value is None or (field is not None and field.rule in (READ, SERVED) and _is_of(field, api)):
            continue
        if field is None or not _is_of(field, api):
            known = sorted(name for name, each in FIELDS.items() if each.rule == READ and _is_of(each, api))
            raise Refused(400, f"{name}={shown(value)}: this endpoint does not serve it; expected one of {known}")
        taken = (*run.get(name, ()), *field.taken)
        if _with_effect(name, value, taken) in taken:
            continue
        sentence = f"{name}={shown(value)}: {field.does.format(name=name, run=repr(taken[0]) if taken else '')}"
        if field.rule == AFTER:
            said[name] = sentence
        elif field.rule == RUN and name in ignore:
            said[name] = f"{sentence}; it is replaced, as agent.ignore says"
        else:
            wanted = " or ".join(["no such field", *map(repr, taken[:1])])
            more = f"; agent.ignore=[{name}] replaces it" if field.rule == RUN else ""
            raise Refused(_STATUS.get(name, 400), f"{sentence}; expected {wanted}{more}", _CODES.get(name))
    return said


def _is_of(field: Field, api: str) -> bool:
    return not field.apis or api in field.apis


def _with_effect(name: str, value: Any, taken: Sequence[Any]) -> Any:
    """The part of a value that asks for more than the run does anyway."""
    if name in ("text", "output_config") and isinstance(value, Mapping):
        return {key: each for key, each in value.items() if key not in ("verbosity", "effort") and each is not None}
    if name == "chat_template_kwargs" and isinstance(value, Mapping):
        return {key: each for key, each in value.items() if key not in taken[0] or taken[0][key] != each}
    if name == "include" and isinstance(value, list):
        return [each for each in value if each != "reasoning.encrypted_content"]
    if name == "context_management" and isinstance(value, Mapping) and isinstance(value.get("edits"), list):
        keeps = {"type": "clear_thinking_20251015", "keep": "all"}
        return {**value, "edits": [edit for edit in value["edits"] if edit != keeps]}
    return value
