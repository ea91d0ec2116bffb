"""A run in Weights & Biases: every number, the recipe as configuration, and a few completions as a table.

- One wandb run per run directory: its id is kept in `<run_dir>/trackers.json`, so a resumed run goes on in the same one.
- The x axis is our own metric `step`; wandb's counter only ever goes up and would drop what is logged again after a resume. Steps that were done
  twice are there twice, told apart by `attempt`.
- The table `samples` is bounded: the first TABLE_ROWS completions of a step, texts cut to TABLE_CHARACTERS, at most about TABLES tables a run.
  The whole text of every completion stays in `samples/`.
- Nothing needs a network with `mode: offline` (or WANDB_MODE=offline): `wandb sync` uploads the attempts of a run later, in order.
- The key comes from the environment or wandb's own login, never from a recipe. Console output, code and git state are not captured, and
  configuration values that look like a secret are blanked.
"""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from rftcli.errors import EXIT_FAILED, EXIT_OK
from rftcli.events import EvalDone, Event, RunEnded, RunStarted, StepDone
from rftcli.observe.files import read_json, write_json
from rftcli.observe.numbers import flatten, flatten_evals, number
from rftcli.observe.samples import first_samples
from rftcli.observe.text import clean
from rftcli.redact import redacted

TABLE_ROWS = 16
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
        mode = chosen.get("mode")
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
            # "online" is the default of wandb too, and left to it so that WANDB_MODE can say otherwise for one machine
            mode=None if mode == "online" else mode,
            id=_kept_id(run_dir),
            resume="allow",
            dir=str(run_dir),
            config=_configuration(run_dir),
            settings=wandb.Settings(console="off", save_code=False, disable_code=True, disable_git=True, init_timeout=INIT_SECONDS),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def see(self, event: Event) -> None:
        match event:
            case RunStarted():
                self._started(event)
            case StepDone():
                self._log(event, {**flatten(event.metrics, "/"), **self._samples(event)})
            case EvalDone():
                self._log(event, {f"eval/{name}": value for name, value in flatten_evals(event.sets, "/").items()})
            case RunEnded():
                self._exit_code = EXIT_FAILED if event.status == "failed" else EXIT_OK

    def close(self) -> None:
        """Finish the wandb run, as failed unless its end was seen. In online mode this waits until everything is uploaded."""
        if self._run is not None:
            run, self._run = self._run, None
            run.finish(exit_code=self._exit_code)

    def _started(self, event: RunStarted) -> None:
        self._run.config.update({"run": redacted(event.info)}, allow_val_change=True)
        steps = number(event.info.get("steps"))
        if steps is not None:
            self._table_every = max(math.ceil(steps / TABLES), 1)

    def _log(self, event: Event, values: Mapping[str, Any]) -> None:
        self._run.log({**values, "step": event.step, "attempt": event.attempt})

    def _samples(self, event: StepDone) -> dict[str, Any]:
        if event.step != 1 and event.step % self._table_every != 0:
            return {}
        rows = [_row(event.step, sample) for sample in first_samples(self._run_dir, event.step, TABLE_ROWS)]
        return {"samples": self._table(columns=list(COLUMNS), data=rows)} if rows else {}


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
    path = run_dir / "trackers.json"
    kept = read_json(path)
    section = kept.get("wandb")
    if isinstance(section, Mapping) and isinstance(section.get("id"), str):
        return section["id"]
    fresh = secrets.token_hex(8)
    write_json(path, {**kept, "wandb": {"id": fresh}})
    return fresh
