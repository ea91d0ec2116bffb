"""A run in Weights & Biases: every number, the recipe as configuration, and a few completions as a table.

- One wandb run per run directory: its id is kept in `<run_dir>/trackers.json`, so a resumed run goes on in the same one.
- The x axis is our own metric `step`; wandb's counter only ever goes up and would drop what is logged again after a resume. A step that is done
  again with the same numbers is not logged again; one with other numbers is there twice, told apart by `attempt`.
- Curves are grouped by the panels of `panels`: `reward/reward_mean`, `policy/kl`, `time/rollout`, `eval/<set>/mean@1`.
- The table `samples` is bounded: the first `upload_samples` completions of a step, texts cut to TABLE_CHARACTERS, at most about TABLES tables a run.
  The whole text of every completion stays in `samples/`.
- Nothing needs a network with `mode: offline` (or WANDB_MODE=offline): `wandb sync` uploads the attempts of a run later, in order.
- Online mode without a network goes on offline and says so once; nothing waits for a server that does not answer.
- The key comes from the environment or wandb's own login, never from a recipe. Console output, code and git state are not captured, and
  configuration values that look like a secret are blanked.
"""

from __future__ import annotations

import json
import math
import netrc
import os
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from rftcli.errors import EXIT_FAILED, EXIT_OK, RftError
from rftcli.events import EvalDone, Event, RunEnded, RunStarted, StepDone, Warned, read_events
from rftcli.observe.files import read_json, write_json
from rftcli.observe.follow import newest_attempt
from rftcli.observe.numbers import flatten, flatten_evals, number
from rftcli.observe.panels import NAMES as PANEL_NAMES
from rftcli.observe.panels import in_panels
from rftcli.observe.reach import answers
from rftcli.observe.samples import first_samples
from rftcli.observe.text import clean
from rftcli.redact import redacted

SERVER = "https://api.wandb.ai"
TABLE_ROWS = 16
"""Unless `upload_samples` says otherwise."""
TABLE_CHARACTERS = 2000
TABLES = 100
STEPS_BETWEEN_TABLES = 10
"""Used when the length of the run is unknown."""
INIT_SECONDS = 60.0
"""How long wandb may take to answer at the start."""
COLUMNS = ("step", "draw", "sample", "label", "prompt", "completion", "reference", "reward", "advantage", "tokens", "finish")
_TEXT_COLUMNS = ("label", "prompt", "completion", "reference", "finish")


class Wandb:
    """`options`: the mapping of `track.wandb` (project, entity, group, name, tags, mode), all optional."""

    def __init__(self, run_dir: Path, options: Mapping[str, Any] | None = None) -> None:
        import wandb

        chosen = dict(options or {})
        mode = chosen.get("mode") or "online"
        if mode == "online":  # the default of wandb too, so WANDB_MODE can say otherwise for one machine
            mode = os.environ.get("WANDB_MODE") or "online"
        server = os.environ.get("WANDB_BASE_URL") or SERVER
        self.note: str | None = None
        """What a person should know although nothing failed."""
        if mode == "online" and _has_key(server) and not answers(server):
            mode = "offline"
            self.note = f"offline: {server} does not answer; `wandb sync {run_dir / 'wandb' / 'offline-run-*'}` sends the data later"
        self._online = server if mode == "online" else None
        self._rows = TABLE_ROWS if chosen.get("upload_samples") is None else int(chosen["upload_samples"])
        self._attempt = newest_attempt(run_dir)
        self._done = _done_before(run_dir, self._attempt)
        self._run_dir = run_dir
        self._table = wandb.Table
        self._table_every = STEPS_BETWEEN_TABLES
        self._exit_code = EXIT_FAILED
        self._run: Any = wandb.init(
            project=chosen.get("project") or "rft",
            entity=chosen.get("entity"),
            group=chosen.get("group"),
            name=chosen.get("name") or run_dir.resolve().name,
            tags=list(chosen.get("tags") or ()) or None,
            mode=mode,
            id=_kept_id(run_dir),
            resume="allow",
            dir=str(run_dir),
            config=_configuration(run_dir),
            settings=wandb.Settings(console="off", save_code=False, disable_code=True, disable_git=True, init_timeout=INIT_SECONDS),
        )
        self._run.define_metric("step")
        for name in (*(f"{panel}/*" for panel in PANEL_NAMES), "samples", "*"):
            self._run.define_metric(name, step_metric="step")

    def see(self, event: Event) -> None:
        match event:
            case RunStarted():
                self._started(event)
            case StepDone():
                self._log(event, in_panels(flatten(event.metrics, "/")), self._samples)
            case EvalDone():
                self._log(event, {f"eval/{name}": value for name, value in flatten_evals(event.sets, "/").items()})
            case Warned():
                self._run.log({f"warning/{event.code}": clean(event.text, TABLE_CHARACTERS), "step": event.step, "attempt": event.attempt})
            case RunEnded():
                self._exit_code = EXIT_FAILED if event.status == "failed" else EXIT_OK

    def close(self) -> None:
        """Finish the wandb run, as failed unless its end was seen. In online mode this waits until everything is uploaded."""
        if self._run is not None:
            run, self._run = self._run, None
            if self._online is not None and not answers(self._online):
                raise RftError(f"{self._online} does not answer any more; `wandb sync {Path(run.dir).parent}` sends what it lacks")
            run.finish(exit_code=self._exit_code)
            write_json(_ids(self._run_dir), {**read_json(_ids(self._run_dir)), "wandb": {"id": run.id, "finished": self._attempt}})

    def _started(self, event: RunStarted) -> None:
        self._run.config.update({"run": redacted(event.info)}, allow_val_change=True)
        steps = number(event.info.get("steps"))
        if steps is not None:
            self._table_every = max(math.ceil(steps / TABLES), 1)

    def _log(self, event: Event, values: Mapping[str, Any], samples: Callable[[Event], dict[str, Any]] | None = None) -> None:
        if self._done.get((event.kind, event.step)) == _comparable(values):
            return  # an earlier attempt did this step with the same numbers, and they are there
        self._run.log({**values, **(samples(event) if samples is not None else {}), "step": event.step, "attempt": event.attempt})

    def _samples(self, event: Event) -> dict[str, Any]:
        if self._rows == 0 or (event.step != 1 and event.step % self._table_every != 0):
            return {}
        rows = [_row(event.step, sample) for sample in first_samples(self._run_dir, event.step, self._rows)]
        return {"samples": self._table(columns=list(COLUMNS), data=rows)} if rows else {}


def _comparable(values: Mapping[str, Any]) -> dict[str, Any]:
    """Without what a clock or an allocator measured: that differs from one attempt to the next."""
    return {name: str(value) for name, value in values.items() if not name.startswith(("time/", "memory/"))}


def _done_before(run_dir: Path, attempt: int) -> dict[tuple[str, int], dict[str, Any]]:
    """(kind, step) -> numbers that earlier attempts have logged, if their trackers finished what they had begun."""
    kept = read_json(_ids(run_dir)).get("wandb")
    finished = kept.get("finished", 0) if isinstance(kept, Mapping) else 0
    if attempt < 2 or finished != attempt - 1 or not (run_dir / "events.jsonl").is_file():
        return {}
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for event in read_events(run_dir / "events.jsonl"):
        if event.attempt >= attempt:
            continue
        if isinstance(event, StepDone):
            found[event.kind, event.step] = _comparable(in_panels(flatten(event.metrics, "/")))
        elif isinstance(event, EvalDone):
            found[event.kind, event.step] = _comparable({f"eval/{name}": value for name, value in flatten_evals(event.sets, "/").items()})
    return found


def _has_key(server: str) -> bool:
    """Is there something to log in with? Without it wandb itself says what to do."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    kept = Path(os.environ.get("NETRC") or "~/.netrc").expanduser()
    try:
        return netrc.netrc(str(kept)).authenticators(urlsplit(server).hostname or "") is not None
    except (OSError, netrc.NetrcParseError):
        return False


def _ids(run_dir: Path) -> Path:
    """What trackers have to find again after a resume. The checkpoint keeps a copy."""
    return run_dir / "trackers.json"


def _row(step: int, sample: Mapping[str, Any]) -> list[Any]:
    """One row with one type a column, which wandb insists on: text columns are text, the others numbers or None."""
    found: list[Any] = [step]
    for name in COLUMNS[1:]:
        value = sample.get(name)
        if name in _TEXT_COLUMNS:
            text = "" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
            found.append(clean(text, TABLE_CHARACTERS, lines=True))
        else:
            found.append(number(value))
    return found


def _configuration(run_dir: Path) -> dict[str, Any]:
    """The resolved recipe as it lies on disk, where environment values are still unexpanded; empty if there is none."""
    path = run_dir / "recipe.resolved.yaml"
    if not path.is_file():
        return {}
    recipe = yaml.safe_load(path.read_text(encoding="utf-8"))
    return redacted(recipe) if isinstance(recipe, dict) else {}


def _kept_id(run_dir: Path) -> str:
    """The id of this run directory's wandb run; drawn and written down before its first use, so that a crash cannot lose it."""
    path = _ids(run_dir)
    kept = read_json(path)
    section = kept.get("wandb")
    if isinstance(section, Mapping) and isinstance(section.get("id"), str):
        return section["id"]
    fresh = secrets.token_hex(8)
    write_json(path, {**kept, "wandb": {"id": fresh}})
    return fresh
