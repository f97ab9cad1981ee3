"""The one conversation that every client has: a question, two calls of a tool, an answer."""

SYSTEM = "You add."
QUESTION = "What is 12 + 3, and 3 more?"
ADD = "Adds two numbers."
NUMBERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
    "additionalProperties": False,  # as pydantic-ai adds it
}
FUNCTION = {"name": "add", "description": ADD, "parameters": NUMBERS}


def add(a: int, b: int) -> str:
    """Adds two numbers.

    Args:
        a: One number.
        b: Another number.
    """
    return str(a + b)
