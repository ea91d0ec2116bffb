"""The live screen, drawn into a recorded terminal."""

import io
import math

import pytest
from rich.cells import cell_len
from rich.console import Console as RichConsole

from rftcli.events import EvalDone, Progress, RunEnded, RunStarted, Warned
from rftcli.observe.console import Console
from rftcli.observe.history import History
from rftcli.observe.screen import MIN_COLUMNS, Around, Frame, frame_lines

HOSTILE = "\x1b[2J\x1b]0;owned\x07[bold red]四[/bold red] [/] [link=http://x]\u202e:smile: \ud800" * 7000


def _events(step_done, hostile=""):
    yield RunStarted(time=0.0, attempt=1, step=0, info={"name": f"gsm8k{hostile}", "device": "cpu", "engine": "hf", "ranks": 2, "steps": 200})
    for step in range(1, 41):
        yield step_done(
            step,
            reward_mean=step / 100,
            kl=0.001 * step,
            response_tokens={"mean": 200.0 - step},
            reward_parts={f"math{hostile}": {"mean": 0.25, "std": 0.5, "errors": 3}},
            labels={f"easy{hostile}": 0.75},
            seconds={"rollout": 6.0, f"learn{hostile}": 3.0, "total": 10.0},
        )
        if step % 10 == 0:
            sets = {f"test{hostile}": {"mean@1": {"value": step / 100, "low": 0.1, "high": 0.9}, "prompts": 64}}
            yield EvalDone(time=1000.0, attempt=1, step=step, seconds=1.0, sets=sets)
    yield Warned(time=1400.0, attempt=1, step=40, code="truncated", text=f"cut{hostile}")
    yield Progress(time=1402.0, attempt=1, step=40, stage=f"rollout{hostile}", done=3, of=20)


def _text(lines):
    return "\n".join(line.plain.rstrip() for line in lines)


@pytest.fixture
def history(step_done):
    history = History()
    for event in _events(step_done):
        history.see(event)
    return history


SAMPLE = {"prompt": "What is 2+2?", "completion": "The answer is\n\n4", "reward": 1.0, "finish": "stop"}


def test_a_frame(history):
    assert _text(frame_lines(history, SAMPLE, now=1450.0, width=100)).split("\n") == [
        "gsm8k  cpu  hf  2 ranks  200 steps",
        "",
        "step 40/200 20% ━━━━━━━━━━━━────────────────────────────────────────────────  10.0s/step  eta 26m",
        "now: rollout 3/20  (last sign of life 48.0s ago)",
        "",
        "reward    ▁▁▁▁▁▂▂▂▂▂▃▃▃▃▃▄▄▄▄▄▅▅▅▅▅▆▆▆▆▆▇▇▇▇▇█████        0.400",
        "held out  ▁▃▆█                                            test mean@1 0.400 [0.100,0.900]",
        "length    █████▇▇▇▇▇▆▆▆▆▆▅▅▅▅▅▄▄▄▄▄▃▃▃▃▃▂▂▂▂▂▁▁▁▁▁        160 tokens",
        "kl        ▁▁▁▁▁▂▂▂▂▂▃▃▃▃▃▄▄▄▄▄▅▅▅▅▅▆▆▆▆▆▇▇▇▇▇█████        0.040",
        "",
        "seconds   ██████████████████████████████████████████      10.0s  rollout 60%  learn 30%",
        "",
        "! truncated (step 40): cut",
        "",
        "reward part                  mean      std  errors",
        "math                        0.250    0.500       3",
        "label                      reward",
        "easy                        0.750",
        "",
        "sample of step 40  reward 1.00  stop",
        "  What is 2+2?",
        "  The answer is",
        "",
        "  4",
    ]


@pytest.mark.parametrize("width", [MIN_COLUMNS, 33, 59, 60, 80, 120, 400])
@pytest.mark.parametrize("ascii_only", [False, True])
def test_any_width_and_any_text_fit(step_done, width, ascii_only):
    history = History()
    for event in _events(step_done, hostile=HOSTILE):
        history.see(event)
    sample = {"prompt": HOSTILE, "completion": HOSTILE, "reward": "nan", "finish": HOSTILE}
    lines = frame_lines(history, sample, now=1402.0, width=width, ascii_only=ascii_only)
    assert all(cell_len(line.plain) <= width for line in lines)
    text = _text(lines)
    assert len(lines) < 60
    assert "\x1b" not in text
    text.encode("ascii" if ascii_only else "utf-8")
    assert "40/200" in text


def test_narrow_frames_keep_the_numbers(history):
    text = _text(frame_lines(history, SAMPLE, now=None, width=40))
    for number in ("step 40/200", "0.400", "160 tokens", "0.040", "10.0s"):
        assert number in text
    assert "now:" not in text and "eta" not in text  # nothing is going on any more
    assert "eta 26m" in _text(frame_lines(history, SAMPLE, now=1402.0, width=40))


def test_stages_that_do_not_fit_are_left_out_whole(step_done):
    history = History()
    seconds = {"rollout": 60.0, "learn": 20.0, "score": 10.0, "sync": 5.0, "credit": 4.0, "total": 100.0}
    history.see(step_done(1, seconds=seconds))
    (line,) = (text.plain.rstrip() for text in frame_lines(history, None, now=None, width=100) if text.plain.startswith("seconds"))
    assert line.endswith("  100s  rollout 60%  learn 20%  score 10%")
    (line,) = (text.plain.rstrip() for text in frame_lines(history, None, now=None, width=200) if text.plain.startswith("seconds"))
    assert line.endswith("  sync 5%  credit 4%")


@pytest.mark.parametrize(("reason", "key"), [("interrupt", "Ctrl-C again"), ("terminate", "Ctrl-C")])
def test_a_stop_request_is_shown_while_the_run_goes_on(history, reason, key):
    around = Around(stop_reason=reason)
    text = f"stopping after this step ({key} ends it now)"
    assert text in _text(frame_lines(history, SAMPLE, now=1403.0, width=100, around=around))
    assert "stopping" not in _text(frame_lines(history, SAMPLE, now=None, width=100, around=around))
    assert "stopping" not in _text(frame_lines(history, SAMPLE, now=1403.0, width=100))


def test_a_frame_before_anything_happened():
    assert _text(frame_lines(History(), None, now=0.0, width=80)).split("\n") == ["run"]


@pytest.mark.parametrize("value", ["nan", "inf", math.nan])
def test_numbers_that_are_not_finite_are_drawn(step_done, value):
    history = History()
    history.see(step_done(1, reward_mean=value, kl=value, seconds={"total": value, "rollout": value}))
    assert str(value) in _text(frame_lines(history, {"reward": value}, now=0.0, width=80))


@pytest.fixture
def terminal():
    def make(width, height, **kwargs):
        return RichConsole(width=width, height=height, file=io.StringIO(), record=True, _environ={}, **{"force_terminal": True, **kwargs})

    return make


def test_the_live_screen_gives_the_terminal_back_with_one_last_frame(tmp_path, step_done, write_samples, terminal):
    write_samples(tmp_path, 40, [{"prompt": "P?", "completion": "[bold]一[/bold] " * 20_000, "reward": 0.5}])
    rich_console = terminal(100, 30)
    console = Console(tmp_path, console=rich_console, clock=lambda: 1403.0)
    for event in _events(step_done):
        console.see(event)
    console.see(RunEnded(time=1500.0, attempt=1, step=40, status="failed", cause="[red]boom[/red]"))
    console.close()
    console.close()
    raw = rich_console.file.getvalue()
    assert raw.index("\x1b[?1049h") < raw.index("\x1b[?1049l")  # the second screen, and back
    assert raw.rindex("\x1b[?25l") < raw.rindex("\x1b[?25h")  # the cursor too
    assert raw[raw.rindex("\x1b[?1049l") :].count("gsm8k") == 1
    last = rich_console.export_text().split("gsm8k")[-1]
    for text in ("failed after 25m00s", "step 40/200", "test mean@1 0.400", "sample of step 40  reward 0.500", "[bold]一[/bold]"):
        assert text in last
    assert "boom" not in last  # the command says why, once


def test_the_second_screen_opens_when_the_newest_attempt_starts(tmp_path, terminal):
    (tmp_path / "attempts" / "1").mkdir(parents=True)
    rich_console = terminal(200, 30)
    console = Console(tmp_path, console=rich_console, clock=lambda: 30.0)
    (tmp_path / "attempts" / "2").mkdir()
    events = [
        RunStarted(time=0.0, attempt=1, step=0, info={"name": "gsm8k"}),
        RunEnded(time=10.0, attempt=1, step=0, status="failed", cause="boom"),
        Warned(time=20.0, attempt=2, step=0, code="slow_disk", text="t"),
    ]
    for event in events:
        console.see(event)
    assert rich_console.file.getvalue() == f"{tmp_path.name}: starting the ranks\nlog: {tmp_path}/logs/latest/rank_0.log\n"
    console.see(RunStarted(time=30.0, attempt=2, step=0, info={"name": "gsm8k"}))
    assert "\x1b[?1049h" in rich_console.file.getvalue()
    console.close()
    console.see(RunStarted(time=31.0, attempt=2, step=0))
    assert rich_console.file.getvalue().count("\x1b[?1049h") == 1


def test_a_start_that_fails_leaves_the_terminal_alone(tmp_path, terminal):
    rich_console = terminal(200, 30)
    console = Console(tmp_path, console=rich_console)
    console.see(RunEnded(time=3.0, attempt=1, step=0, status="failed", cause="no such model\nhint: look"))
    console.close()
    shown = rich_console.export_text()
    assert "\x1b[?1049h" not in rich_console.file.getvalue()
    assert [line.rstrip() for line in shown.split("\n")[2:]] == [""]  # the command says the rest


def test_the_screen_reads_the_stop_request_of_its_attempt(tmp_path, step_done, terminal):
    rich_console = terminal(100, 30)
    console = Console(tmp_path, console=rich_console, clock=lambda: 1403.0)
    (tmp_path / "attempts" / "1").mkdir(parents=True)
    (tmp_path / "attempts" / "1" / "stop.json").write_text('{"reason": "interrupt", "time": 1.0}')
    console.see(step_done(1, reward_mean=0.5))
    assert "stopping after this step (Ctrl-C again ends it now)" in rich_console.file.getvalue()
    console.close()


def test_a_low_terminal_loses_the_sample_first_but_not_in_the_last_frame(history, terminal):
    rich_console = terminal(100, 12)
    frame = Frame(lambda draw: draw(history, SAMPLE, Around()), clock=lambda: 1403.0)
    rich_console.print(frame)
    live = rich_console.export_text()
    assert "step 40/200" in live
    assert "sample" not in live
    assert live.count("\n") == 11
    frame.final = True
    rich_console.print(frame)
    assert "sample of step 40" in rich_console.export_text()


def test_a_frame_follows_the_size_of_the_terminal(history, terminal):
    rich_console = terminal(100, 40)
    frame = Frame(lambda draw: draw(history, SAMPLE, Around()), clock=lambda: 1403.0)
    for width in (100, 40, 70):
        rich_console.width = width
        rich_console.print(frame)
        lines = rich_console.export_text().split("\n")
        assert width // 2 < max(cell_len(line) for line in lines) <= width


def test_a_pipe_gets_the_last_frame_alone(tmp_path, step_done, terminal):
    rich_console = terminal(80, 25, force_terminal=False)
    console = Console(tmp_path, console=rich_console)
    for event in _events(step_done):
        console.see(event)
    assert rich_console.file.getvalue() == ""
    console.close()
    assert "\x1b" not in rich_console.file.getvalue()
    assert "step 40/200" in rich_console.file.getvalue()


def test_a_critic_has_curves_and_a_setting_has_one_once_it_moves(step_done):
    history = History()
    labels = []
    for step, coefficient in ((1, 0.05), (2, 0.05), (3, 0.06)):
        history.see(step_done(step, reward_mean=0.5, kl=0.1, kl_coefficient=coefficient, value_mean=0.25 * step, value_loss=0.5))
        labels.append([line.split("  ")[0] for line in _text(frame_lines(history, None, now=None, width=100)).split("\n") if line])
    assert not any("kl coef." in label for label in labels[1]) and {"value", "v. loss", "kl"} <= set(labels[1])
    assert "kl coef." in labels[2]
    shown = _text(frame_lines(history, None, now=None, width=100))
    assert "0.750" in shown and "0.060" in shown
