"""The lines of a log, character for character."""

import io

import pytest

from rftcli.events import CheckpointSaved, EvalDone, Logged, Progress, RunEnded, RunStarted, StepDone, Warned
from rftcli.observe.plain import WIDTH, Plain

METRICS = {
    "reward_mean": 0.5314,
    "kl": 0.00123,
    "loss": -0.00312,
    "grad_norm": 0.84,
    "lr": 1e-6,
    "response_tokens": {"mean": 182.4, "max": 256},
    "truncated_fraction": 0.02,
    "zero_signal_fraction": 0.25,
    "seconds": {"rollout": 8.1, "learn": 3.2, "sync": 1.0, "total": 12.3},
}


@pytest.fixture
def printed(tmp_path):
    def run(*events):
        stream = io.StringIO()
        plain = Plain(tmp_path, stream=stream)
        for event in events:
            plain.see(event)
        plain.close()
        return stream.getvalue().split("\n")[:-1]

    return run


def _start(**info):
    return RunStarted(time=0.0, attempt=1, step=0, info={"name": "gsm8k", **info})


def _step(step, metrics):
    return StepDone(time=12.3 * step, attempt=1, step=step, metrics=metrics)


def _eval(step, sets):
    return EvalDone(time=0.5, attempt=1, step=step, seconds=1.25, sets=sets)


def test_a_whole_run(printed):
    rest = "len  182 cut  2% nosig 25%   12.3s roll 66% learn 26%  eta 40m"
    half = {
        "mean@1": {"value": 0.5, "low": 0.4, "high": 0.6},
        "pass@4": {"value": 0.7},
        "prompts": 64,
        "response_tokens": 12.3,
        "truncated_fraction": 0.0,
    }
    lines = printed(
        _start(ranks=2, device="cpu", engine="hf", steps=200, nested={"left": "out"}),
        _eval(0, {"gsm8k": half}),
        _step(1, METRICS),
        _step(2, {**METRICS, "reward_mean": -1.5, "lr": 1.24e-6}),
        CheckpointSaved(time=30.0, attempt=1, step=2, path="checkpoints/step_000002", seconds=3.2),
        Warned(time=30.0, attempt=1, step=2, code="zero_signal", text="All the same."),
        Logged(time=30.0, attempt=1, step=2, text="stop requested"),
        RunEnded(time=31.0, attempt=1, step=2, status="stopped", cause="asked to"),
    )
    assert lines == [
        "start gsm8k | attempt 1 | ranks 2 device cpu engine hf steps 200",
        "eval step 0 | gsm8k 64 prompts | mean@1 0.500 [0.400,0.600] pass@4 0.700 len 12.3 cut 0% | 1.2s",
        f"step   1/200  reward  0.531 eval@0 0.500  kl 0.0012 loss -0.0031 grad 0.840 lr   1e-6  {rest}",
        f"step   2/200  reward  -1.50 eval@0 0.500  kl 0.0012 loss -0.0031 grad 0.840 lr 1.2e-6  {rest}",
        "checkpoint step 2 | checkpoints/step_000002 | 3.2s",
        "warning (step 2) zero_signal: All the same.",
        "log: stop requested",
    ]  # how it ended is said by the command, once


def test_the_start_names_the_model_and_the_batch(printed):
    batch = "32 prompts x 8 samples = 256 completions a step = 1 update x 2 ranks x 128 rows (one micro-batch of 128)"
    model = "/home/someone/experiments/with/a/long/way/down/to/checkpoints/step_000030/policy"
    assert printed(_start(model=model, parameters=771968, batch=batch, logprob_probe=3.814697265625e-06, rate=0.5)) == [
        "start gsm8k | attempt 1 | model .../step_000030/policy parameters 771,968 rate 0.500",
        f"  batch {batch}",
        "  log-prob probe: at most 3.8e-6 nats from the model's plain forward",
    ]
    assert printed(_start(batch="x " * WIDTH)) == ["start gsm8k | attempt 1 |", "  batch" + " x" * 71, *["    x" + " x" * 72, "    x" + " x" * 5]]


def test_of_a_resumed_run_only_the_newest_attempt_is_printed(tmp_path):
    (tmp_path / "attempts" / "1").mkdir(parents=True)
    stream = io.StringIO()
    plain = Plain(tmp_path, stream=stream)
    (tmp_path / "attempts" / "2").mkdir()  # made after the observer
    for event in (
        _start(steps=40),
        _eval(0, {"gsm8k": {"mean@1": {"value": 0.25}}}),
        _step(20, {"reward_mean": 0.1}),
        RunEnded(time=500.0, attempt=1, step=20, status="failed", cause="boom"),
        RunStarted(time=900.0, attempt=2, step=10, info={"name": "gsm8k", "steps": 40}),
        StepDone(time=910.0, attempt=2, step=11, metrics={"reward_mean": 0.5}),
    ):
        plain.see(event)
    assert stream.getvalue().split("\n") == [
        "attempt 2 goes on after step 10",
        "start gsm8k | attempt 2 | steps 40",
        "step 11/40  reward  0.500 eval@0 0.250",
        "",
    ]


def test_only_metrics_that_are_present(printed):
    assert printed(_step(3, {"reward_mean": 0.25, "grad_norm": "nan"})) == ["step 3  reward  0.250  grad   nan"]
    assert printed(_step(3, {})) == ["step 3"]


def test_steps_line_up(printed):
    lines = printed(_start(steps=1000), *[_step(step, {**METRICS, "loss": 10.0 ** (step % 5 - 3)}) for step in range(1, 1001)])[1:]
    assert {line.index("nosig") for line in lines} == {lines[0].index("nosig")}


def test_no_line_is_wider_than_the_bound(printed):
    huge = {
        "reward_mean": -123456.0, "kl": -1e-30, "loss": -1e-300, "grad_norm": 1e300, "lr": 1e-300, "response_tokens": {"mean": 123456.0},
        "truncated_fraction": 0.5, "zero_signal_fraction": 0.5, "seconds": {"a" * 99: 5e6, "b" * 99: 4e6, "total": 1e7},
    }  # fmt: skip
    many = {f"pass@{k}": {"value": 0.5, "low": 0.4, "high": 0.6} for k in range(20)}
    lines = printed(
        _start(steps=10**9, **{f"key{i}": "x" * 500 for i in range(10)}),
        _eval(0, {"set" * 100: many}),
        *[_step(10**9 - 1 + i, huge) for i in range(2)],
        Warned(time=0.0, attempt=1, step=1, code="c" * 300, text="word " * 100 + "x" * 1000),
        RunEnded(time=0.0, attempt=1, step=1, status="failed", cause="y" * 100_000),
    )
    assert max(len(line) for line in lines) <= WIDTH
    assert "".join(lines).count("pass@") == 20
    assert len(lines) < 60


def test_hostile_text_cannot_break_out_of_its_line(printed):
    lines = printed(
        _start(device="\x1b[2Jcpu\nfake line"),
        Warned(time=0.0, attempt=1, step=1, code="c\x1b[31m", text="a\x00b\r\x1b]0;x\x07 \ud800 [bold]"),
    )
    assert lines == ["start gsm8k | attempt 1 | device cpu fake line", "warning (step 1) c: a\ufffdb \ufffd [bold]"]


def test_a_stream_that_cannot_encode_gets_question_marks(tmp_path):
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii", newline="\n")
    Plain(tmp_path, stream=stream).see(Logged(time=0.0, attempt=1, step=0, text="日本 ok"))
    assert raw.getvalue() == b"log: ?? ok\n"


def test_progress_speaks_only_after_thirty_seconds_and_then_in_turns(printed):
    def progress(time, stage="rollout", step=1):
        return Progress(time=time, attempt=1, step=step, stage=stage, done=int(time), of=512)

    quick = [progress(float(t)) for t in range(0, 30, 2)]
    assert printed(*quick) == []
    slow = [progress(float(t)) for t in range(0, 94, 2)]
    assert printed(*slow) == [
        "  rollout 32/512 after 32.0s (step 1)",
        "  rollout 64/512 after 1m04s (step 1)",
    ]
    changing = [progress(float(t), stage="rollout" if t < 20 else "learn", step=1) for t in range(0, 48, 2)]
    assert printed(*changing) == []


def test_a_critic_and_a_moving_coefficient_have_fields_of_their_own(printed):
    critic = {"value_mean": 0.25, "value_loss": 0.0123, "kl_coefficient": 0.051}
    (line,) = printed(_step(1, {**METRICS, **critic}))
    assert line == (
        "step 1  reward  0.531  kl 0.0012 beta 0.051 loss -0.0031 grad 0.840 lr   1e-6  value  0.250 vloss 0.012  "
        "len  182 cut  2% nosig 25%   12.3s roll 66%"
    )


@pytest.mark.parametrize(
    ("columns", "lines"),
    [
        (
            60,
            [
                "start gsm8k | attempt 1 | ranks 2 device cpu",
                "    engine hf steps 200",
                "  batch 32 prompts x 8 samples = 256 completions a step = 1",
                "    update x 2 ranks x 128 rows",
                "eval step 0 | gsm8k 1 prompt |",
                "    mean@1 0.500 [0.400,0.600] pass@4 0.700",
                "    len 12.3 | 1.2s",
                "step   1/200  reward  0.531 eval@0 0.500  len  182   12.3s",
                "warning (step 1) c: word word word word word word word word",
                "    word word",
            ],
        ),
        (90, ["step   1/200  reward  0.531 eval@0 0.500  kl 0.0012  len  182 cut  2%   12.3s  eta 40m"]),
    ],
)
def test_on_a_narrow_terminal_lines_fit_and_keep_what_matters_most(tmp_path, on_terminal, columns, lines):
    sets = {"gsm8k": {"mean@1": {"value": 0.5, "low": 0.4, "high": 0.6}, "pass@4": {"value": 0.7}, "prompts": 1, "response_tokens": 12.3}}
    batch = "32 prompts x 8 samples = 256 completions a step = 1 update x 2 ranks x 128 rows"

    def run(stream):
        plain = Plain(tmp_path, stream=stream)
        plain.see(_start(ranks=2, device="cpu", engine="hf", steps=200, batch=batch))
        plain.see(_eval(0, sets))
        plain.see(_step(1, METRICS))
        plain.see(Warned(time=0.0, attempt=1, step=1, code="c", text="word " * 10))

    shown = on_terminal(columns, run).split("\n")[:-1]
    assert max(map(len, shown)) <= columns
    assert [line for line in shown if len(lines) > 1 or line.startswith("step")] == lines
