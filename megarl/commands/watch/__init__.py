"""`megarl watch RUN`: a page in the terminal that shows what a run, started anywhere, is doing now.

It reads the files of the run's folder, and only what was added since it looked last: `metrics.jsonl`, `samples.jsonl`,
`timeline.jsonl`, `advice.jsonl`, `status.json`.  It asks no process and changes nothing.
"""
