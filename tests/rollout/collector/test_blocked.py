"""Code of the user that blocks the loop is named with its file and line."""

import sys
import threading
import time

from megarl.rollout.collector.blocked import LoopWatch, users_line

CODE = """
import subprocess


def episode():
    subprocess.run(["sleep", "2"])
"""


def test_the_line_that_blocks_is_reported_once(tmp_path):
    file, scope = tmp_path / "agent.py", {}
    exec(compile(CODE, str(file), "exec"), scope)
    said, heard = [], threading.Event()

    def report(sentence):
        said.append(sentence)
        heard.set()

    watch = LoopWatch(report, limit_s=0.5)
    watch.beat()
    scope["episode"]()
    assert heard.wait(30) and len(said) == 1
    assert said[0].startswith(f"episode at {file}:6 has blocked the event loop of all episodes and rewards for 0.5 s")


def test_code_of_libraries_alone_is_nobodys_fault():
    assert users_line(None) is None
    seen = []
    thread = threading.Thread(target=time.sleep, args=(2,))
    thread.start()
    while not seen:
        frame = sys._current_frames()[thread.ident]
        seen.append(users_line(frame))
    thread.join()
    assert seen == [None]
