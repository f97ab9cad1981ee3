"""Runs episodes of `verifiers`, in the environment that has it: JSON lines on stdin are requests, on stdout replies.

    .venv-verifiers/bin/python -P verifiers_worker.py TASKSET_ID --rows 1000 > tasks.jsonl     writes rows of data
    .venv-verifiers/bin/python -P verifiers_worker.py TASKSET_ID [--env JSON]                  serves episodes

Nothing of megarl is imported: the model is an address.  The package's reward comes back, not its tokens: what the model
wrote is recorded where it was written.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import traceback
from functools import partial
from types import ModuleType
from typing import Any

import verifiers.v1 as vf
from openai import AsyncOpenAI
from pydantic import ValidationError
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.utils.loaders import default_harness_id, env_config_type, load_environment, resolve_env_config

MODEL = "policy"  # as the endpoint calls it
DIRECT = "megarl_direct"


class Direct(vf.Harness[vf.HarnessConfig]):
    """One answer to a question or a conversation, in this process; others start a program for every episode."""

    APPENDS_SYSTEM_PROMPT = SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any, **_: Any
    ) -> Any:
        system, prompt = self.resolve_prompt(data)
        said = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [_plain(each) for each in prompt]
        messages = [{"role": "system", "content": system}] * bool(system) + said
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            await client.chat.completions.create(model=ctx.model, messages=messages)
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


def environment(taskset: str, settings: dict[str, Any]) -> Any:
    """The package's environment of this taskset; `settings` are laid over ours.

    A role asks in this process, unless it, its taskset or `settings` bring another harness.
    """
    sys.modules[DIRECT] = module = ModuleType(DIRECT)  # harnesses are found by the name of a module
    module.Direct, module.__all__ = Direct, ["Direct"]  # type: ignore[attr-defined]
    is_plain = default_harness_id(taskset) == "bash"  # the package's own default
    ours: dict[str, Any] = {"taskset": {"id": taskset}}
    for name, role in agent_config_fields(env_config_type(taskset, settings.get("id") or "")()).items():
        harness = {"harness": {"id": DIRECT}} if role.harness is None and is_plain else {}
        ours[name] = {"runtime": {"type": "subprocess"}, **harness}
    return load_environment(resolve_env_config(_laid_over(ours, settings)))


def _laid_over(below: Any, above: Any) -> Any:
    """Mappings are joined, with what they hold; of other values that of `above` counts."""
    if not (isinstance(below, dict) and isinstance(above, dict)):
        return above
    return below | {name: _laid_over(below.get(name), value) for name, value in above.items()}


def _plain(message: Any) -> Any:
    return message if isinstance(message, dict) else message.model_dump(mode="json", exclude_none=True)


def rows(env: Any, most: int) -> None:
    for task in env.taskset.take(most):
        data = task.data.model_dump(mode="json", exclude_defaults=True)
        print(json.dumps({"prompt": str(data.get("prompt", "")), "data_source": "verifiers", "task": data}))


async def episode(env: Any, request: dict[str, Any]) -> dict[str, Any]:
    kind = type(env.taskset).task_type()
    task = kind(kind.data_type().model_validate(request["task"]), env.config.taskset.task)
    client = vf.EvalClientConfig(base_url=request["base_url"], api_key_var="_")  # the address holds the key
    (slot,) = env.slots(task)
    found = await env.run_slot(slot, vf.ModelContext(client=client, model=MODEL, sampling=vf.SamplingConfig()))
    if not found.ok:
        errors = [error.message for each in (found, *found.traces) for error in each.errors]
        return {"error": " ".join("; ".join(errors).split())[-500:]}
    rewards = {name: one.value for trace in found.traces for name, one in trace.rewards.items() if one is not None}
    return {"reward": sum(trace.reward for trace in found.traces), "rewards": rewards}


async def serve(env: Any, replies: Any) -> None:
    """Answers requests as they come, until stdin ends."""
    reader = asyncio.StreamReader(limit=1 << 26)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    running: dict[int, asyncio.Task[None]] = {}

    async def answer(request: dict[str, Any]) -> None:
        try:
            reply = await episode(env, request)
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps({"id": request["id"], **reply}), file=replies, flush=True)

    def ended(number: int, _: asyncio.Task[None]) -> None:
        del running[number]

    async with env.serving():
        while line := await reader.readline():
            request = json.loads(line)
            if "cancel" in request:
                if task := running.get(request["cancel"]):
                    task.cancel()
                continue
            number = request["id"]
            running[number] = asyncio.create_task(answer(request))
            running[number].add_done_callback(partial(ended, number))
        for task in list(running.values()):
            task.cancel()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("taskset")
    parser.add_argument("--env", type=json.loads, default={}, help="further settings of the environment")
    parser.add_argument("--rows", type=int, help="write so many tasks as rows of data")
    options = parser.parse_args()
    sys.path.insert(0, os.getcwd())  # tasksets of one's own
    replies, sys.stdout = sys.stdout, sys.stderr  # what the package prints is no reply
    try:
        env = environment(options.taskset, options.env)
    except ValidationError as error:  # of the settings
        faults = (f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
        sys.exit(f"error: settings of {options.taskset}: {'; '.join(faults)}")
    except Exception as error:
        traceback.print_exc()
        sys.exit(f"error: {options.taskset}: {type(error).__name__}: {' '.join(str(error).split())}")
    if options.rows is None:
        asyncio.run(serve(env, replies))
    else:
        sys.stdout = replies
        rows(env, options.rows)


if __name__ == "__main__":
    main()
