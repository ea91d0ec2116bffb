"""Every number of a run as a TensorBoard scalar, at the step it belongs to. Uses TensorBoard's own writer: no torch, no TensorFlow.

The files lie in `<run_dir>/tensorboard`, or in a directory of the recipe: a relative one inside the run directory, one outside of it with the
name of the run directory below, so that several runs stand side by side. A resumed run goes on in the same place: its first step tells
TensorBoard to forget that step and everything after it, so the last attempt wins. Leaves out text, images and histograms.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rftcli.events import EvalDone, Event, StepDone, Warned
from rftcli.observe.numbers import flatten, flatten_evals
from rftcli.observe.panels import in_panels

RELOADABLE = "brain.Event:2"
"""The file version from which readers honour the mark of a restart."""


class TensorBoard:
    """Tags: the metric behind its panel (`panels`): `reward/reward_mean`, `policy/kl`, `time/rollout`; `eval/<set>/<metric>` with `/low` and `/high`
    where there is an interval; the text of a warning as `warning/<code>`."""

    def __init__(self, run_dir: Path, options: bool | str | None = None) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, types_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self.directory = _directory(run_dir.resolve(), options if isinstance(options, str) else "tensorboard")
        self._event = event_pb2.Event
        self._restart = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._summary = summary_pb2.Summary
        self._metadata = summary_pb2.SummaryMetadata(plugin_data=summary_pb2.SummaryMetadata.PluginData(plugin_name="text"))
        self._text = lambda text: tensor_pb2.TensorProto(dtype=types_pb2.DT_STRING, string_val=[text.encode("utf-8")])
        self._writer: EventFileWriter | None = EventFileWriter(str(self.directory))
        self._began_attempt = 0

    def see(self, event: Event) -> None:
        if isinstance(event, StepDone):
            if event.attempt > max(self._began_attempt, 1):
                self._forget_from(event)
            self._began_attempt = event.attempt
            self._write(event, in_panels(flatten(event.metrics, "/")))
        elif isinstance(event, EvalDone):
            self._write(event, {f"eval/{name}": value for name, value in flatten_evals(event.sets, "/").items()})
        elif isinstance(event, Warned):
            self._write_text(event, f"warning/{event.code}", event.text)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _forget_from(self, event: Event) -> None:
        assert self._writer is not None, "the writer is closed"
        self._writer.add_event(self._event(step=event.step, wall_time=event.time, file_version=RELOADABLE))
        self._writer.add_event(self._event(step=event.step, wall_time=event.time, session_log=self._restart))

    def _write(self, event: Event, scalars: Mapping[str, Any]) -> None:
        assert self._writer is not None, "the writer is closed"
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
        self._writer.add_event(self._event(step=event.step, wall_time=event.time, summary=self._summary(value=values)))
        self._writer.flush()

    def _write_text(self, event: Event, tag: str, text: str) -> None:
        assert self._writer is not None, "the writer is closed"
        value = self._summary.Value(tag=tag, metadata=self._metadata, tensor=self._text(text))
        self._writer.add_event(self._event(step=event.step, wall_time=event.time, summary=self._summary(value=[value])))
        self._writer.flush()


def _directory(run_dir: Path, chosen: str) -> Path:
    place = (run_dir / Path(chosen).expanduser()).resolve()
    return place if place.is_relative_to(run_dir) else place / run_dir.name
