"""Agents: programs that talk to the model, and the record of what they said to each other as token ids.

`conversation`: a tree of turns; what of it becomes rows to learn. `session`: one agent's episode; asks the servers and
fills a conversation. `transcript`: what was said, for readers. `answer`: what a generated text says: reasoning,
content, tool calls. `endpoint`: the HTTP server that agents get as base_url; `chat_completions`, `responses`,
`anthropic_messages`: the APIs that it speaks; `refusals`: what a request may not ask. `load`: the user's function, and
how it is called; `adapters`: those of other libraries. `chat`: what such a function gets. `process`: agents in
processes of their own; `line_worker`: one process for many requests; `in_thread`: functions in threads of their own.
`episodes`: the writer of a run, which a collector calls.
Nothing here depends on Megatron, losses, or the source of the weights.
"""
