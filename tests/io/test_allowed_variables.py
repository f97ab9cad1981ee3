import os
import subprocess
import sys

from megarl.io.environment import allowed_variables, is_allowed

SHOW = [sys.executable, "-c", "import os; print(*os.environ)"]


def test_what_programs_need_is_allowed_and_nothing_else():
    needed = ("PATH", "HOME", "LC_ALL", "PYTHONPATH", "OMP_NUM_THREADS", "HF_HUB_OFFLINE")
    others = ("MEGARL_TOKEN", "HF_TOKEN", "WANDB_API_KEY", "AWS_SESSION_TOKEN", "OPENAI_API_KEY", "GH_TOKEN", "NEW")
    assert [name for name in (*needed, *others) if is_allowed(name, "x")] == [*needed]


def test_a_proxy_is_allowed_without_a_password():
    assert is_allowed("https_proxy", "http://proxy:3128")
    assert not is_allowed("HTTPS_PROXY", "http://me:secret@proxy:3128")


def test_a_program_gets_allowed_variables_and_this_process_keeps_all(monkeypatch):
    monkeypatch.setenv("SOME_KEY", "secret")
    shown = subprocess.run(SHOW, capture_output=True, text=True, check=True, env=allowed_variables()).stdout.split()
    assert "PATH" in shown and "SOME_KEY" not in shown
    assert os.environ["SOME_KEY"] == "secret"
