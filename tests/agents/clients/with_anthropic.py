"""Drives the endpoint with the stock package anthropic; prints JSON."""

import asyncio
import json

from anthropic import APIStatusError, AsyncAnthropic

TOOLS = [
    {
        "name": "add",
        "description": "Adds.",
        "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    }
]


async def main():
    async with AsyncAnthropic(max_retries=0) as client:
        common = {"model": "policy", "max_tokens": 200, "system": "You add.", "tools": TOOLS}
        messages = [{"role": "user", "content": "12 + 3?"}]
        counted = await client.messages.count_tokens(model="policy", system="You add.", tools=TOOLS, messages=messages)
        first = await client.messages.create(messages=messages, **common)
        use = next(block for block in first.content if block.type == "tool_use")
        messages.append({"role": "assistant", "content": [block.model_dump() for block in first.content]})
        result = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "15"}]}
        messages.append({"role": "user", "content": [result]})
        texts = []
        async with client.messages.stream(messages=messages, **common) as stream:
            async for text in stream.text_stream:
                texts.append(text)
            final = await stream.get_final_message()
        try:
            await client.messages.create(messages=messages, **common, extra_body={"temperature": 0.5})
            refused = None
        except APIStatusError as error:
            refused = [error.status_code, error.body["error"]["message"], type(error).__name__]
    print(
        json.dumps(
            {
                "input": use.input,
                "stop": [first.stop_reason, final.stop_reason],
                "texts": texts,
                "counted": counted.input_tokens - first.usage.input_tokens,
                "usage": final.usage.output_tokens,
                "refused": refused,
            }
        )
    )


asyncio.run(main())
