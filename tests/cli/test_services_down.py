"""Commands on a recipe whose reward services are down: those that score say so part by part, those that only look never connect."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from socket import socket

import pytest
from fake_services import FakeService, closed_port, listening

from rftcli.cli.main import main
from rftcli.errors import EXIT_FAILED, EXIT_OK

SERVICE = "models.scorers.service={{kind: http, urls: ['http://127.0.0.1:{port}/score'], retries: 1, timeout_seconds: 5, batch_size: 2}}"
JUDGE = (
    "models.scorers.judge={{kind: generative, path: org/judge, prompt: 'Rate {{{{ completion }}}}', score: {{regex: '(.)'}}, retries: 1, "
    "placement: {{server: 'http://127.0.0.1:{port}/v1'}}}}"
)


RECIPE = """\
models: {policy: {path: 'builtin:quickstart'}}
data: {train: {path: rows.jsonl}}
rollout: {max_prompt_tokens: 64, max_new_tokens: 64}
train: {steps: 2}
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    Path("r.yaml").write_text(RECIPE)
    rows = [{"prompt": f"{number}+1=", "answer": str(number + 1)} for number in range(3)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def rft(*command: str, port: int, rewards: str, also: tuple[str, ...] = ()) -> int:
    sets = [SERVICE.format(port=port), JUDGE.format(port=port), f"rewards={rewards}", *also]
    with pytest.raises(SystemExit) as caught:
        main([*command, "r.yaml", *(word for text in sets for word in ("--set", text))])
    return int(str(caught.value.code))


MIXED = "{default: [{rule: exact}, {model: service, on_error: abstain}, {model: judge, weight: 0}]}"


def test_parts_whose_services_are_down_have_errors_and_the_others_scores(capsys: pytest.CaptureFixture[str]) -> None:
    port = closed_port()
    assert rft("rewards", "try", port=port, rewards=MIXED) == EXIT_FAILED
    shown = capsys.readouterr().out
    table = {line.split()[0]: line.split()[1:6] for line in shown.splitlines() if line.startswith(("exact", "service", "judge"))}
    # weight, scored, abstained, errors, mean
    assert table == {"exact": ["1", "3", "0", "0", "1.00"], "service": ["1", "0", "0", "3", "-"], "judge": ["0", "0", "0", "3", "-"]}
    assert "exact 1.00, service error, judge error" in shown
    errors = shown.partition("errors:")[2].splitlines()[1:]
    assert [line.split(" x ")[0].strip() for line in errors] == ["service: 3", "judge: 3"]
    assert f"http://127.0.0.1:{port}/score could not be asked: ConnectError" in errors[0]
    assert f"127.0.0.1:{port}/v1/chat/completions could not be asked" in errors[1]


def test_a_part_that_stops_runs_ends_it_with_the_row(capsys: pytest.CaptureFixture[str]) -> None:
    assert rft("rewards", "try", port=closed_port(), rewards="{default: [{model: service, on_error: stop}]}") == EXIT_FAILED
    said = capsys.readouterr()
    assert "reward part `service` failed on row train:" in said.err and "could not be asked" in said.err and "Traceback" not in said.err


def test_json_has_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert rft("rewards", "try", "--json", port=closed_port(), rewards=MIXED) == EXIT_FAILED
    found = json.loads(capsys.readouterr().out)
    parts = {part["name"]: part for part in found["parts"]}
    assert (parts["service"]["scored"], sum(parts["service"]["errors"].values()), parts["service"]["mean"]) == (0, 3, None)
    assert [sample["reward"] for sample in found["samples"]] == [1.0] * 3  # the service abstains, the judge has no weight


def test_labels_are_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    labels = "{hard: [{model: service}], default: [{rule: exact}]}"
    rows = [{"prompt": "1+1=", "answer": "2", "label": label} for label in ("hard", "default")]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert rft("rewards", "try", port=closed_port(), rewards=labels, also=("data.train.columns={label: label}",)) == EXIT_FAILED
    assert "hard.service: 1 x " in capsys.readouterr().out


def test_services_that_are_up_are_all_right(capsys: pytest.CaptureFixture[str]) -> None:
    with FakeService(lambda asked, number: {"rewards": [0.5] * len(asked.body["query"]), "extra_logs": {"words": 3}}) as service:
        port = int(service.url.rpartition(":")[2])
        assert rft("rewards", "try", "--json", port=port, rewards="{default: [{model: service}]}") == EXIT_OK
    (first, *_) = json.loads(capsys.readouterr().out)["samples"]
    assert (first["reward"], first["metrics"]) == (0.5, [["service/words", 3.0]])


@pytest.fixture
def watched() -> Iterator[socket]:
    """A port that notes who connects."""
    with closing(listening()) as bound:
        bound.setblocking(False)
        yield bound


@pytest.mark.parametrize("command", [("validate-recipe",), ("plan", "--ranks", "1"), ("show",)])
def test_what_only_looks_calls_nobody(watched: socket, command: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    name, *options = command
    assert rft(name, *options, port=watched.getsockname()[1], rewards=MIXED) == EXIT_OK, capsys.readouterr().err
    with pytest.raises(BlockingIOError):
        watched.accept()
