"""The servers as one: which of them gets a request, how it is sent, and what happens when it fails.

`pool`: balances requests over the trusted servers. `pool_server`: one server and its running requests. `sender`: one
request to one server. `pace`: which servers are slow. `slots`: limits what runs at a time, and measures waiting.
"""
