"""Structured output by instructor in the modes that are named: prints the result of each."""

import json
import sys
from collections.abc import Iterable

import instructor
from pydantic import BaseModel


class Sum(BaseModel):
    total: int


found = []
for mode in sys.argv[1:]:
    provider = "anthropic" if mode.startswith("ANTHROPIC") else "openai"
    client = instructor.from_provider(f"{provider}/policy", mode=instructor.Mode[mode])
    kind = Iterable[Sum] if "PARALLEL" in mode else Sum
    question = [{"role": "user", "content": f"{mode}: 12 + 3?"}]
    result = client.create(response_model=kind, messages=question, max_tokens=200, max_retries=0)
    found.append(next(iter(result)).total if "PARALLEL" in mode else result.total)
print(json.dumps(found))
