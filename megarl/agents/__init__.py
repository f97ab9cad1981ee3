"""Agents: programs that talk to the model, and the record of their conversations as token ids.

`conversation`: a tree of turns, and the rows to learn of it. `session`: one agent's episode; asks the servers and
fills a conversation. `answer`: reads a generated text: reasoning, content, tool calls; `tool_calls`: their forms.
`endpoint`: the HTTP server that agents get as base_url; `chat_completions`, `responses`, `anthropic_messages`: its
APIs; `refusals`: what a request may not ask. `load`: the user's function, and how it is called; `adapters`:
environments of other libraries. `chat`: what such a function gets. `process`: agents in processes of their own.
`episodes`: the sample generator of a run, which a collector calls.
Nothing here depends on Megatron, losses, or the source of the weights.
"""
