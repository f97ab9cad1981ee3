"""Drives the endpoint with the stock package openai; prints what it got as JSON."""

import asyncio
import json

from openai import APIStatusError, AsyncOpenAI

FUNCTION = {
    "name": "add",
    "description": "Adds.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
}
TOOLS = [{"type": "function", "function": FUNCTION}]


async def chats(client):
    messages = [{"role": "user", "content": "12 + 3?"}]
    first = await client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
    message = first.choices[0].message
    messages.append(message.model_dump(exclude_none=True, exclude={"reasoning_content"}))
    messages.append({"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "15"})
    text, usage, finish = "", None, None
    stream = await client.chat.completions.create(
        model="policy", messages=messages, tools=TOOLS, stream=True, stream_options={"include_usage": True}
    )
    async for chunk in stream:
        for choice in chunk.choices:
            text += choice.delta.content or ""
            finish = choice.finish_reason or finish
        usage = chunk.usage or usage
    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "Thanks"}]
    last = await client.chat.completions.create(model="policy", messages=messages, tools=TOOLS, n=2)
    streamed = []
    async with client.chat.completions.stream(model="policy", messages=messages, tools=TOOLS) as events:
        async for event in events:
            streamed.append(event.type)
        final = await events.get_final_completion()
    return {
        "arguments": message.tool_calls[0].function.arguments,
        "finish": [first.choices[0].finish_reason, finish],
        "text": text,
        "usage": usage.total_tokens - usage.prompt_tokens - usage.completion_tokens,
        "both": [choice.message.content for choice in last.choices],
        "helper": final.choices[0].message.content,
        "events": sorted(set(streamed)),
    }


async def others(client):
    response = await client.responses.create(model="policy", input="hi")
    texts = []
    async with client.responses.stream(model="policy", input="hi") as events:
        async for event in events:
            if event.type == "response.output_text.delta":
                texts.append(event.delta)
        final = await events.get_final_response()
    completion = await client.completions.create(model="policy", prompt="hi", max_tokens=3)
    models = [model.id async for model in client.models.list()]
    try:
        await client.chat.completions.create(
            model="policy", messages=[{"role": "user", "content": "x"}], temperature=0.3
        )
        refused = None
    except APIStatusError as error:
        refused = [error.status_code, error.body["message"], type(error).__name__]
    return {
        "response": response.output_text,
        "streamed": ["".join(texts), final.output_text],
        "completion": completion.choices[0].text,
        "models": models,
        "refused": refused,
    }


async def main():
    async with AsyncOpenAI(max_retries=0) as client:
        print(json.dumps(await chats(client) | await others(client)))


asyncio.run(main())
