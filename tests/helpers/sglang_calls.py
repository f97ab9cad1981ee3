"""Runs in SGLang's environment: what its own parsers of tool calls read.

    python sglang_calls.py < texts.json

Input: {"tools": [...], "texts": [[name of a parser, text], ...]}.  Output: a list with [[name, JSON of its arguments],
...] for each.
"""

import json
import logging
import sys

from sglang.srt.entrypoints.openai.protocol import Tool
from sglang.srt.function_call.function_call_parser import FunctionCallParser

logging.disable()
given = json.load(sys.stdin)
tools = [Tool.model_validate(tool) for tool in given["tools"]]
found = []
for parser, text in given["texts"]:
    if parser == "gpt-oss":
        text = "<|start|>assistant" + text  # the end of the prompt
    _, calls = FunctionCallParser(tools, parser).parse_non_stream(text)
    found.append([[call.name, call.parameters] for call in calls])
print(json.dumps(found))
