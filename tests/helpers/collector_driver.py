"""A driver with one collector, whose reward has a process: for tests of signals to all processes of the driver's group.

    python collector_driver.py URL MODEL LOG

gets a group for each line that it reads, and then prints the collector's pid and the restarts.  It heeds SIGTERM by
printing it, as a run would finish its step.
"""

import json
import signal
import sys
from functools import partial
from pathlib import Path

from megarl.rewards.scorer import Rewards
from megarl.rollout.collector.collector import CollectorSettings
from megarl.rollout.collector.collector_client import Collectors
from megarl.rollout.protocol import SamplingParams
from megarl.rollout.settings import GenerationSettings
from megarl.samples.sample import Prompt

if __name__ == "__main__":
    url, model, log = sys.argv[1:]
    signal.signal(signal.SIGTERM, lambda *_: print("SIGTERM", flush=True))
    collectors = Collectors(
        CollectorSettings((url,), "", model, GenerationSettings(timeout_s=200), partial(Rewards, ["exact"]), Path(log)),
        warn=lambda sentence: print(sentence, file=sys.stderr),
    )
    try:
        for line in sys.stdin:
            prompt = Prompt(line.strip(), [5, 6, 7], "x", "1")
            (ticket,) = collectors.submit([prompt], n=1, params=SamplingParams(max_new_tokens=4))
            while ticket.group is None:
                collectors.wait(0.05)
            print(json.dumps([*collectors.pids, collectors.counters["restarts"]]), flush=True)
    finally:
        collectors.close()
