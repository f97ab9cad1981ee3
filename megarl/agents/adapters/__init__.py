"""Adapters: environments written for other libraries, as episodes of ours.

Each is a module with `load(address, arguments)`, which gets what follows the prefix in `agent.fn` and returns an
`async def episode(chat, prompt)`, `(base_url, prompt)` or `(base_url, api_key, prompt)`; `agents.load` has their table.
"""
