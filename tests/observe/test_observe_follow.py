"""Following a growing event file, and observers that fail."""

import logging
import threading
import time

import pytest

from rftcli.events import RunEnded, RunStarted, Warned, to_line
from rftcli.observe.follow import Audience, Tail, follow, newest_attempt


class Recorder:
    """Keeps what it sees."""

    def __init__(self):
        self.seen, self.closed = [], 0

    def see(self, event):
        self.seen.append(event)

    def close(self):
        self.closed += 1

    @property
    def steps(self):
        return [(e.attempt, e.step) for e in self.seen if e.kind == "step"]


class Breaking(Recorder):
    """Fails at its third event, and cannot be closed."""

    def see(self, event):
        super().see(event)
        if len(self.seen) == 3:
            raise OSError("disk full")

    def close(self):
        super().close()
        raise RuntimeError("still broken")


def _end(attempt, status="done"):
    return RunEnded(time=9.0, attempt=attempt, step=0, status=status)


def test_waits_for_the_file_and_for_torn_lines(tmp_path, step_done):
    events = [RunStarted(time=0.0, attempt=1, step=0, info={"name": "日本"}), *[step_done(s, note="u\u2028x") for s in range(1, 6)], _end(1)]
    data = "".join(to_line(e) + "\n" for e in events).encode("utf-8")

    def write():
        time.sleep(0.05)
        with (tmp_path / "events.jsonl").open("wb", buffering=0) as file:
            for start in range(0, len(data), 37):  # cuts lines, and characters of more than one byte
                file.write(data[start : start + 37])
                time.sleep(0.002)

    writer = threading.Thread(target=write)
    recorder = Recorder()
    writer.start()
    ended = follow(tmp_path, [recorder], attempt=1, poll_seconds=0.005)
    writer.join()
    assert ended == events[-1]
    assert recorder.seen == events
    assert recorder.closed == 0


def test_returns_at_the_end_of_this_attempt_only(tmp_path, step_done, append_events):
    append_events(tmp_path, [step_done(1, 1), step_done(2, 1), _end(1, "failed"), step_done(2, 2), _end(2), step_done(3, 3)])
    whole, own = Recorder(), Recorder()
    assert follow(tmp_path, [whole], attempt=2) == _end(2)
    assert whole.steps == [(1, 1), (1, 2), (2, 2)]
    assert follow(tmp_path, [own], attempt=2, from_start=False) == _end(2)
    assert own.steps == [(2, 2)]


def test_a_later_attempt_means_that_this_one_is_over(tmp_path, step_done, append_events):
    append_events(tmp_path, [step_done(1, 1), step_done(2, 2)])
    recorder = Recorder()
    assert follow(tmp_path, [recorder], attempt=1) is None
    assert recorder.steps == [(1, 1)]


def test_a_torn_line_in_the_middle_is_passed_over(tmp_path, step_done):
    lines = [
        to_line(step_done(1)),
        to_line(step_done(2))[:40],
        to_line(step_done(3)),
        '{"event": "from_the_future", "time": 1}',
        "",
        to_line(_end(1)),
    ]
    (tmp_path / "events.jsonl").write_bytes("\n".join(lines).encode() + b"\n")
    recorder = Recorder()
    assert follow(tmp_path, [recorder], attempt=1) == _end(1)
    assert recorder.steps == [(1, 1), (1, 3)]


def test_when_the_writer_is_gone_everything_it_wrote_is_still_read(tmp_path, step_done, append_events):
    def gone():  # it writes once more between the last look and its end
        append_events(tmp_path, [step_done(2)])
        return True

    append_events(tmp_path, [step_done(1)])
    recorder = Recorder()
    assert follow(tmp_path, [recorder], attempt=1, stop=gone) is None
    assert recorder.steps == [(1, 1), (1, 2)]
    assert follow(tmp_path / "never", [recorder], attempt=1, stop=lambda: True) is None


def test_an_observer_that_raises_is_reported_once_and_the_others_go_on(tmp_path, step_done, append_events, caplog):
    append_events(tmp_path, [*[step_done(s) for s in range(1, 7)], _end(1)])
    before, breaking, after, failures = Recorder(), Breaking(), Recorder(), []
    with caplog.at_level(logging.WARNING):
        follow(tmp_path, [before, breaking, after], attempt=1, on_failure=lambda *failure: failures.append(failure))
    assert len(breaking.seen) == 3
    assert breaking.closed == 1
    assert [(observer, str(error)) for observer, error in failures] == [(breaking, "disk full")]
    assert len([r for r in caplog.records if r.levelno == logging.ERROR]) == 1
    for other in (before, after):
        assert other.steps == [(1, s) for s in range(1, 7)]
        (warning,) = [e for e in other.seen if isinstance(e, Warned)]
        assert warning.code == "observer_failed"
        assert "Breaking" in warning.text
        assert "disk full" in warning.text


def test_closing_goes_on_after_one_that_raises(step_done):
    first, second = Breaking(), Recorder()
    failures = []
    audience = Audience([first, second], lambda *failure: failures.append(failure))
    audience.see(step_done(1))
    audience.close()
    audience.close()
    assert (first.closed, second.closed) == (1, 1)
    assert [str(error) for _, error in failures] == ["still broken"]
    assert audience.observers == ()


def test_all_observers_may_fail(step_done):
    audience = Audience([Breaking(), Breaking()])
    for step in range(5):
        audience.see(step_done(step))
    assert audience.observers == ()


def test_an_interrupt_is_not_swallowed(step_done):
    class Interrupting(Recorder):
        def see(self, event):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Audience([Interrupting()]).see(step_done(1))


def test_tail_reads_a_large_file_in_pieces(tmp_path, step_done):
    with (tmp_path / "events.jsonl").open("w", encoding="utf-8") as file:
        for step in range(3):
            file.write(to_line(step_done(step, note="x" * 700_000)) + "\n")
        file.write(to_line(step_done(3))[:-1])
    tail = Tail(tmp_path / "events.jsonl")
    assert [e.step for e in tail.events()] == [0, 1, 2]
    with (tmp_path / "events.jsonl").open("a", encoding="utf-8") as file:
        file.write("}\n")
    assert [e.step for e in tail.events()] == [3]
    assert list(tail.events()) == []
    tail.close()


def test_the_newest_attempt_is_the_highest_number(tmp_path):
    assert newest_attempt(tmp_path) == 0
    for name in ("2", "10", "note"):
        (tmp_path / "attempts" / name).mkdir(parents=True)
    assert newest_attempt(tmp_path) == 10
