"""TensorBoard files, read back with TensorBoard's own reader."""

import math
import time

import pytest

from rftcli.events import EvalDone, RunStarted
from rftcli.observe.tensorboard import TensorBoard


@pytest.fixture
def read():
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def scalars(directory):
        accumulator = EventAccumulator(str(directory), size_guidance={"scalars": 0})
        accumulator.Reload()
        return {tag: [(e.step, e.value) for e in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]}

    return scalars


def _eval(step, attempt, value):
    sets = {"gsm8k": {"mean@1": {"value": value, "low": 0.0, "high": 1.0}, "prompts": 64}}
    return EvalDone(time=1.0, attempt=attempt, step=step, seconds=1.0, sets=sets)


def test_every_number_under_its_name_and_step(tmp_path, step_done, read):
    board = TensorBoard(tmp_path, True)
    board.see(_eval(0, 1, 0.25))
    board.see(
        step_done(7, reward_mean=0.5, reward_parts={"math": {"mean": 0.25, "errors": 2}}, seconds={"rollout": 3}, kl="nan", huge=1e300, note="text")
    )
    written = read(tmp_path / "tensorboard")  # readable while the run goes on
    board.close()
    board.close()
    assert math.isnan(written.pop("policy/kl")[0][1])
    assert written == {
        "eval/gsm8k/mean@1": [(0, 0.25)],
        "eval/gsm8k/mean@1/low": [(0, 0.0)],
        "eval/gsm8k/mean@1/high": [(0, 1.0)],
        "eval/gsm8k/prompts": [(0, 64.0)],
        "reward/reward_mean": [(7, 0.5)],
        "reward/reward_parts/math/mean": [(7, 0.25)],
        "reward/reward_parts/math/errors": [(7, 2.0)],
        "time/rollout": [(7, 3.0)],
        "other/huge": [(7, math.inf)],
    }


def test_several_runs_share_a_directory_of_the_recipe(tmp_path, step_done, read):
    for name in ("a", "b"):
        board = TensorBoard(tmp_path / "runs" / name, str(tmp_path / "boards"))
        board.see(step_done(1, kl=1.0))
        board.close()
        assert read(tmp_path / "boards" / name) == {"policy/kl": [(1, 1.0)]}


@pytest.mark.parametrize(
    ("chosen", "place"),
    [
        (None, "runs/a/tensorboard"),
        (True, "runs/a/tensorboard"),
        ("tensorboard", "runs/a/tensorboard"),
        ("logs/tb", "runs/a/logs/tb"),
        ("../../tb", "tb/a"),
    ],
)
def test_where_the_files_lie(tmp_path, chosen, place):
    board = TensorBoard(tmp_path / "runs" / "a", chosen)
    board.close()
    assert board.directory == (tmp_path / place).resolve()
    assert list(board.directory.iterdir())


def test_after_a_resume_the_last_attempt_wins_and_nothing_is_lost(tmp_path, step_done, read):
    """Evaluated every 2 steps; attempt 1 dies after step 12, attempt 2 goes on from step 8, is evaluated there again, and ends at 14."""
    for attempt, first, last in [(1, 1, 12), (2, 9, 14)]:
        board = TensorBoard(tmp_path)
        board.see(RunStarted(time=0.0, attempt=attempt, step=first - 1))
        for step in range(first, last + 1):
            board.see(step_done(step, attempt, kl=float(attempt)))
            if step % 2 == 0:
                board.see(_eval(step, attempt, attempt / 4))
        board.close()
        written_at = int(time.time())
        while int(time.time()) == written_at:  # TensorBoard reads files in the order of their names, which have seconds
            time.sleep(0.02)
    written = read(tmp_path / "tensorboard")
    assert written["policy/kl"] == [(s, 1.0) for s in range(1, 9)] + [(s, 2.0) for s in range(9, 15)]
    assert written["eval/gsm8k/mean@1"] == [(s, 0.25) for s in (2, 4, 6, 8)] + [(s, 0.5) for s in (10, 12, 14)]


def test_a_first_attempt_forgets_nothing(tmp_path, step_done, read):
    board = TensorBoard(tmp_path)
    for step in (3, 1, 2):
        board.see(step_done(step, kl=float(step)))
    board.close()
    assert sorted(read(tmp_path / "tensorboard")["policy/kl"]) == [(1, 1.0), (2, 2.0), (3, 3.0)]
