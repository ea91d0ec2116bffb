"""An observer of the user's own, `track.python: module:Class`. It runs in the trackers' side process and sees every event of the run.

    class Mine:
        def __init__(self, run_dir): ...        # optional; `run_dir` is a pathlib.Path
        def see(self, event): ...               # event.kind is "step", "eval", ...; a step has event.metrics
        def close(self): ...                    # optional

What it raises is told once as a warning and switches it off; the run goes on.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rftcli.errors import UsageError
from rftcli.events import Event


def observer_class(target: str, folder: str) -> type:
    """The class that `module:Class` names, looked for beside the recipe first. UsageError with what is wrong."""
    module_name, _, name = target.partition(":")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # a user's module may raise anything while it is imported
        raise UsageError(f"`{target}` cannot be imported: {type(error).__name__}: {error}", hint=f"looked in {folder} and on PYTHONPATH") from error
    found = vars(module).get(name)
    if not inspect.isclass(found):
        classes = [key for key, value in vars(module).items() if inspect.isclass(value) and value.__module__ == module.__name__]
        raise UsageError(f"`{module_name}` has no class `{name}`", hint=f"classes there: {', '.join(classes) or 'none'}")
    if not callable(inspect.getattr_static(found, "see", None)):
        raise UsageError(f"`{target}` has no method `see(self, event)`", hint="it is called with every event of the run")
    return found


class Own:
    """`options`: `target` and the `folder` of the recipe."""

    def __init__(self, run_dir: Path, options: Mapping[str, Any]) -> None:
        cls = observer_class(options["target"], options["folder"])
        takes = [one for one in inspect.signature(cls).parameters.values() if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
        self._observer: Any = cls(run_dir) if takes else cls()
        self._closes = callable(inspect.getattr_static(cls, "close", None))

    def see(self, event: Event) -> None:
        self._observer.see(event)

    def close(self) -> None:
        """Once, however often it is called."""
        if self._closes:
            self._closes = False
            self._observer.close()
