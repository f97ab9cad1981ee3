"""Tool calls as families of models write them: a row for each form, its readers, and which one a chat template writes.

`call`: a call, and the shape of a form. `bodies`: readers of what a call holds: JSON, or tags with keys and values.
`forms`: the table, and the choice. Nothing here knows of requests, sessions, or how an answer was generated.
"""
