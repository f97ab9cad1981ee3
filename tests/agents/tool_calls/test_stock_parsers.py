"""What SGLang's own parsers read of the same texts; where they read something else, it is written down."""

import json
import os
import subprocess

import pytest
from tiny_server import CURRENT, ROOT, sglang_of
from tool_call_texts import ADD, TOOLS, WRITE, cases

STOCK = {
    **{"hermes": "hermes", "qwen3_coder": "qwen3_coder", "glm": "glm45", "minimax_m2": "minimax-m2"},
    **{"kimi_k2": "kimi_k2", "deepseek_v3": "deepseekv3", "deepseek_v31": "deepseekv31"},
    **{"deepseek_v32": "deepseekv32", "llama3": "llama3", "mistral": "mistral", "harmony": "gpt-oss"},
}
# Form and case: what the stock parser reads.
DIFFERENCES = {
    # One malformed call, or the mark of the end in an argument, hides all calls.
    **{(form, "malformed and a call"): [] for form in ("hermes", "deepseek_v3", "deepseek_v31", "mistral")},
    **{(form, "a mark inside"): [] for form in ("hermes", "deepseek_v3", "deepseek_v31", "harmony")},
    # Calls that are cut off or broken are called, with what there is of their arguments.
    ("qwen3_coder", "cut off"): [("say", {"text": "half of it "})],
    ("qwen3_coder", "malformed"): [("add\n<parameter=a", {})],
    ("qwen3_coder", "a mark inside"): [("say", {"text": ""})],
    ("glm", "malformed"): [("add", {})],
    ("glm", "a mark inside"): [("say", {})],
    ("kimi_k2", "malformed"): [("add", '{"a": }')],
    ("harmony", "malformed and a call"): [("add", 1), ADD],
    # Python's None stays a text, while True is read; any value that may be null is null.
    ("qwen3_coder", "python's words"): [("find", {"every": True, "limit": "None"})],
    ("minimax_m2", "numbers"): [("add", {"a": -3, "b": 0}), ("find", {"limit": None, "every": False})],
    # It has a parser of its own for GLM-4.7, which reads this.
    ("glm", "no line breaks"): [],
    ("mistral", "an id"): [],
    # As gpt-oss's template writes calls, and as the model ends them.
    ("harmony", "the recipient in front"): [],
    ("harmony", "without the stop token"): [],
}


def parsed(text):
    try:
        return json.loads(text)
    except ValueError:
        return text


@pytest.mark.sglang
def test_the_stock_parsers_read_the_same_calls():
    named = [(form, name, case) for form in WRITE for name, case in cases(form).items()]
    texts = [[STOCK[form], case.text] for form, _, case in named]
    texts.append(["glm47", cases("glm")["no line breaks"].text])
    done = subprocess.run(
        [sglang_of(CURRENT), str(ROOT / "tests" / "helpers" / "sglang_calls.py")],
        input=json.dumps({"tools": TOOLS, "texts": texts}),
        env=os.environ | {"PYTHONPATH": str(ROOT / "megarl/servers/sglang_cpu"), "SGLANG_USE_CPU_ENGINE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    *found, glm47 = (
        [(name, parsed(arguments)) for name, arguments in calls] for calls in json.loads(done.stdout.splitlines()[-1])
    )
    differences = {
        (form, name): calls for (form, name, case), calls in zip(named, found, strict=True) if calls != case.calls
    }
    assert differences == DIFFERENCES
    assert glm47 == [ADD]
