"""Collectors get no secret through their environment."""

from pathlib import Path

from test_collector import Scorer

from megarl.rollout.collector_client import Collectors

SECRETS = ("MEGARL_TOKEN", "MEGARL_SERVER_TOKEN", "HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY")


def test_a_collector_gets_allowed_variables_only(model_path, tmp_path, monkeypatch):
    for name in SECRETS:
        monkeypatch.setenv(name, f"the secret of {name}")
    collectors = Collectors(
        urls=["http://127.0.0.1:9"],
        token="",
        tokenizer_path=model_path,
        make_scorer=Scorer,
        timeout_s=200,
        log_path=tmp_path / "collector.log",
    )
    try:
        (pid,) = collectors.pids
        variables = Path(f"/proc/{pid}/environ").read_text().split("\0")
    finally:
        collectors.close()
    names = {variable.partition("=")[0] for variable in variables}
    assert "PATH" in names and not names & set(SECRETS)
    assert "the secret of" not in "".join(variables)
