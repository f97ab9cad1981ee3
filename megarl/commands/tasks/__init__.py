"""Tasks of a user's own: what `megarl new` writes, and what the written files call.

A task is a small file, copied as it is: `problem` draws a prompt and its right answer, `mistake` is what the cold start
shows beside right ones.  `prepare` makes rows and a tiny model of it, `reward` is copied too, and `project/` has the
other files.  `agent/` is a project whose task an agent does.  Nothing here knows of training: recipes own_task_sft and
own_task have its settings.
Called by: `megarl new` (the files), a project's task.py (`prepare`).
"""
