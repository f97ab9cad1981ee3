"""Agents: programs that talk to the model, and the record of what they said to each other as token ids.

`conversation`: a tree of turns; what of it becomes rows to learn. `session`: one agent's episode; asks the servers and
fills a conversation. `answer`: what a generated text says: reasoning, content, tool calls. `endpoint`: the HTTP server
that agents get as base_url; `chat_completions`, `responses`, `anthropic_messages`: the APIs that it speaks; `refusals`:
what a request may not ask.
Nothing here depends on Megatron, losses, rewards, or the source of the weights.
"""
