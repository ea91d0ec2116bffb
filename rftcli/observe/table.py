"""The observers there are, by the name they have in the `track` section or on the command line. Nothing is imported before it is used."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from rftcli.errors import UsageError
from rftcli.protocols import Observer


def make_observer(name: str, run_dir: Path, options: Any = None) -> Observer:
    """The observer of that name for one run. `options` is the value of its key in `track`, None for its defaults.

    Raises UsageError for a name that is not in the table; whatever the observer itself raises (a package that is missing, a server that does not
    answer) passes through.
    """
    if name not in OBSERVERS:
        raise UsageError(f"there is no observer named `{name}`", hint=f"known observers: {', '.join(OBSERVERS)}")
    module, attribute = OBSERVERS[name].split(":")
    return getattr(import_module(module), attribute)(run_dir, options)


# How to add one: write a module with a class that takes (run_dir, options), has `see(event)` and `close()` (callable twice), imports its heavy
# packages inside the class, and only ever reads the run directory except for its own output; then add a row. Observers that are named in the
# recipe's `track` section run in the side process of `tracker`; an exception switches the observer off and becomes a warning.
OBSERVERS: dict[str, str] = {
    "plain": "rftcli.observe.plain:Plain",
    "console": "rftcli.observe.console:Console",
    "tensorboard": "rftcli.observe.tensorboard:TensorBoard",
    "wandb": "rftcli.observe.wandb:Wandb",
    "python": "rftcli.observe.own:Own",
}
