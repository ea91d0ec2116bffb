"""What `--smoke` prints, for `train` and `resume`."""

from __future__ import annotations

from pathlib import Path

from rftcli.cli import talk
from rftcli.codec import to_data
from rftcli.plan.plan import Plan


def smoke_test(plan: Plan, run_dir: Path, checkpoint: Path | None, *, step: int, as_json: bool) -> int:
    """Run it, say how it went; the exit code. The run itself does not start."""
    from rftcli.events import Logged, read_events
    from rftcli.runtime.smoke import run_smoke

    talk.say(f"trying {plan.name} under {run_dir / 'smoke'}")
    run, outcome = run_smoke(plan, run_dir, checkpoint, step, [])
    events = list(read_events(run.events)) if run.events.exists() else []
    logs = [event.text for event in events if isinstance(event, Logged)]
    if as_json:
        talk.data({"run_dir": str(run.path), "exit_code": outcome.exit_code, **to_data(outcome.state), "logs": logs})
    if outcome.exit_code == 0:
        talk.say("\n".join(["smoke: ok: two steps, a checkpoint, a resume" + (" and an evaluation" if plan.data.eval else ""), *logs[-1:]]))
    else:
        talk.say(f"smoke: failed in attempt {outcome.state.attempt} after step {outcome.state.step}: {outcome.state.cause}")
    return outcome.exit_code
