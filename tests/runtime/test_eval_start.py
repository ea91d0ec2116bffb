"""What `rft eval` looks at before it loads a model."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from rftcli.errors import HeldUpError
from rftcli.runtime.evaluation import evaluate_only
from rftcli.runtime.prepare import prepare
from rftcli.runtime.rundir import RunDir
from rftcli.runtime.world import SoloWorld


def test_an_evaluation_that_waits_for_a_server_says_so_and_stops_when_asked_to(tmp_path: Path) -> None:
    server = "rollout={engine: vllm, vllm: {server: {urls: ['http://127.0.0.1:9'], ready_seconds: 600}}}"
    plan = prepare(Path("quickstart"), [server], ranks=1, gpus=None).plan
    run = RunDir(tmp_path / "run")
    run.create()
    attempt = run.attempt(1)
    attempt.create()
    attempt.request_stop("interrupt")
    emit = SimpleNamespace(log=lambda text: None, warn=lambda code, text: None)
    with pytest.raises(HeldUpError, match=r"asked to stop while vLLM server http://127\.0\.0\.1:9 was waited for"):
        evaluate_only(plan, run, attempt, SoloWorld(), emit, checkpoint=None)
