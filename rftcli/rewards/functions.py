"""User functions, `python: package.module:function`: found with an error that says what to fix, called with one completion at a time.

A function gets keyword arguments, only those that its signature names (all of them for `**kwargs`): the fields of RECORD, and its part's `options`.
It returns one number, None to abstain, or a mapping of named numbers (each None too), and may be `async`. It is called from several threads at once,
so it must not rely on signals; `async` functions of one table share one event loop. What else it returns or raises is an error of that one sample,
as text that names the function. A class is made once, with the options, when the table opens; its object is then called like a function, and its
`close`, if it has one, at the end.

Leaves out combining (`combine`) and limits of time (`limits`, `grace`): without one, a function that never returns holds up its step until the run is
asked to stop.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import json
import logging
import math
import numbers
import os
import re
import reprlib
import sys
import traceback
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from rftcli.errors import UsageError, words

if TYPE_CHECKING:
    from rftcli.rewards.event_loop import EventLoop

_log = logging.getLogger("rft")
RECORD: Mapping[str, str] = {
    "prompt": "the prompt as the model read it",
    "completion": "the answer's text, a scored prefill in front",
    "completion_ids": "the sampled token ids, a list",
    "reference": "the row's reference answer, or None",
    "label": "the row's label",
    "columns": "all columns of the row, a mapping",
    "messages": "the chat turns of the prompt, a list",
    "finish": "stop, length or abort",
    "tokens": "number of sampled tokens",
    "sample": "index within the group, -1 for a greedy twin",
    "draw": "index of the draw, the group's identity",
    "step": "the step of the run, or None outside of one",
    "total_steps": "steps of the whole run, or None outside of one",
    "log_extra": "log_extra(name, value): a column of the samples file",
    "log_metric": "log_metric(name, number): a metric of the step, averaged over all that log it",
}
"""What a function may ask for, and what it is."""
ROLES = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
LIMIT = 1e12
"""A larger value is an error: rewards become float32, and squares of their weighted sums must fit."""
ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


class UserFunction:
    """A resolved function with its options. Callable from any thread; one that is a class has to be opened first."""

    def __init__(self, target: str, function: Callable[..., Any], wanted: Sequence[str], options: Mapping[str, Any], loop: EventLoop) -> None:
        self._target, self._function, self._wanted, self._options, self._loop = target, function, tuple(wanted), dict(options), loop
        self._closed = False
        self.is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            function.__call__ if isinstance(function, type) else type(function).__call__
        )

    def open(self) -> UserFunction:
        """Make the object of a class; a second time, and for a function, it does nothing. UsageError for whatever the class raises."""
        if isinstance(self._function, type):
            try:
                self._function = self._function(**self._options)
            except (Exception, SystemExit) as error:  # code of the user: whatever it raises is its author's to read
                raise UsageError(f"reward class `{self._target}` could not be made: {describe(error)}") from error
            self._options = {}
        return self

    def close(self) -> None:
        """The object's own `close`, if it has one and was made; a second time it does nothing: one table may score training and evaluation."""
        if not isinstance(self._function, type) and not self._closed:
            self._closed = True
            close_own(self._target, self._function)

    def __call__(self, record: Mapping[str, Any], timeout_seconds: float | None = None) -> Any:
        """What the function returns for a record with the fields it may ask for. Raises whatever it raises; TimeoutError for an `async` one that
        takes too long, which is cancelled."""
        result = self._function(**{name: record[name] for name in self._wanted}, **self._options)
        return self._loop.run(result, timeout_seconds) if self.is_async else result


def close_own(target: str, made: Any) -> None:
    """Call the `close` of an object of the user's, if it has one. The work is done by then: what it raises is logged, and hides no other error."""
    close = getattr(made, "close", None)
    if not callable(close):
        return
    try:
        close()
    except (Exception, SystemExit) as error:
        _log.warning("`%s`.close failed: %s", target, describe(error))


class Log:
    """What a function says about one completion beside its value."""

    def __init__(self) -> None:
        self.extra: dict[str, Any] = {}
        self.metrics: list[tuple[str, float]] = []

    def log_extra(self, name: str, value: Any) -> None:
        """A column of the samples file; what JSON cannot hold is written as text. ValueError for a number that is not finite."""
        self.extra[str(name)] = json.loads(json.dumps(value, default=str, allow_nan=False))

    def log_metric(self, name: str, value: Any) -> None:
        """TypeError or ValueError for anything but a finite number."""
        self.metrics.append((str(name), metric_value(str(name), value)))


def metric_value(name: str, value: Any) -> float:
    """A metric as a finite float; TypeError or ValueError."""
    if not isinstance(value, numbers.Real):
        raise TypeError(f"metric `{name}` must be a number, got a {type(value).__name__}")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"metric `{name}` is {number}, expected a finite number")
    return number


def load_function(
    target: str,
    options: Mapping[str, Any],
    search_path: Iterable[Path | str] = (),
    loop: EventLoop | None = None,
    record: Mapping[str, str] = RECORD,
) -> UserFunction:
    """The function or class `package.module:function`, also `module:Class.method`, which may ask for the fields of `record`. Imports the module;
    directories of `search_path` come before what is installed while it is imported, and behind it afterwards (a module may import its neighbours
    late).

    UsageError: the text is no target, the module is not there or fails, the attribute is not there or not callable, or the signature asks for
    something that is neither in `record` nor in `options`.
    """
    value = load_object(target, search_path)
    if not callable(value):
        raise UsageError(f"reward function `{target}` is a {type(value).__name__}, which cannot be called")
    if loop is None:
        from rftcli.rewards.event_loop import EventLoop

        loop = EventLoop()
    return UserFunction(target, value, _wanted(target, value, options, record), options, loop)


def load_object(target: str, search_path: Iterable[Path | str] = ()) -> Any:
    """What `package.module:name` names, found as `load_function` says. UsageError where there is nothing."""
    module_name, colon, path = target.partition(":")
    if not colon or not all(part.isidentifier() for part in [*module_name.split("."), *path.split(".")]):
        raise UsageError(f"`{target}` does not name a function", hint="write `package.module:function`")
    module = _import(module_name, target, [str(Path(entry).resolve()) for entry in search_path])
    value: Any = module
    for name in path.split("."):
        try:
            value = getattr(value, name)
        except AttributeError:
            origin = module.__spec__.origin if module.__spec__ else None
            where = f"`{module_name}` ({origin or 'no file'})" if value is module else f"`{value!r}`"
            raise UsageError(f"{where} has no `{name}`, for reward function `{target}`", hint=_close(name, vars(module))) from None
    return value


def _import(name: str, target: str, search_path: list[str]) -> ModuleType:
    with _first_on_path(search_path), _prints_to_stderr():
        importlib.invalidate_caches()
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not (name == error.name or name.startswith(error.name + ".")):
                raise UsageError(f"reward function `{target}`: importing `{name}` failed: {error}") from error
            beside = {file.stem: None for folder in search_path for file in Path(folder).glob("*.py")}
            looked = ", ".join([*search_path, "the installed packages"])
            message = f"reward function `{target}`: there is no module `{error.name}`; looked in {looked}"
            raise UsageError(message, hint=_close(name, beside)) from None
        except SystemExit as error:
            message = f"reward function `{target}`: importing `{name}` ends the program ({error})"
            raise UsageError(message, hint="a script keeps what it does under `if __name__ == '__main__':`") from error
        except Exception as error:  # code of the user: whatever it raises is its author's to read
            raise UsageError(f"reward function `{target}`: importing `{name}` failed: {describe(error)}") from error


@contextmanager
def _prints_to_stderr() -> Iterator[None]:
    """What a module prints while it is imported is talk; stdout is for data."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


@contextmanager
def _first_on_path(entries: list[str]) -> Iterator[None]:
    sys.path[:0] = entries
    try:
        yield
    finally:
        for entry in entries:
            sys.path.remove(entry)
        sys.path.extend(entry for entry in dict.fromkeys(entries) if entry not in sys.path)


TYPING_ERROR = 0.75
"""Names that are so alike are the same name, mistyped; others may be a column's."""


def _close(word: str, known: Iterable[str]) -> str | None:
    close = difflib.get_close_matches(word, [name for name in known if not name.startswith("__")], n=1)
    return f"did you mean `{close[0]}`?" if close else None


def _wanted(target: str, function: Callable[..., Any], options: Mapping[str, Any], record: Mapping[str, str]) -> list[str]:
    """Fields of `record` to pass. UsageError if the function cannot be called with them and `options`, or the class not made with `options`."""
    if isinstance(function, type):
        _check(target, _parameters(target, function), (), options, options)
        called = dict(list(_parameters(target, function.__call__).items())[1:])  # without self
        return _check(target, called, record, {}, record)
    clash = sorted(set(options) & set(record))
    if clash:
        raise UsageError(f"reward function `{target}`: options {clash} have names that the record of a completion has")
    return _check(target, _parameters(target, function), record, options, record)


def _parameters(target: str, function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError) as error:
        raise UsageError(f"reward function `{target}` has no signature to read: {error}") from None


def _check(
    target: str, parameters: Mapping[str, inspect.Parameter], record: Iterable[str], options: Mapping[str, Any], known: Iterable[str]
) -> list[str]:
    """Names of `record` that the signature takes. `known`: what a hint may suggest."""
    fields = tuple(record)
    everything = any(item.kind is inspect.Parameter.VAR_KEYWORD for item in parameters.values())
    named = {name: item for name, item in parameters.items() if item.kind in ROLES}
    for name, item in parameters.items():
        required = item.default is inspect.Parameter.empty and item.kind not in (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        if required and (name not in named or (name not in fields and name not in options)):
            if not fields:
                raise UsageError(f"reward class `{target}` asks for `{name}`, which its `options` do not have", hint=_close(name, known))
            hint = _close(name, known) or f"it may ask for {', '.join(fields)}, and for its `options`"
            if "columns" in fields and name not in fields and not difflib.get_close_matches(name, fields, cutoff=TYPING_ERROR):
                hint += f'; a column of the data is `columns["{name}"]`'
            raise UsageError(f"reward function `{target}` asks for `{name}`, which no completion has", hint=hint)
    unknown = sorted(name for name in options if name not in named and not everything)
    if unknown:
        raise UsageError(f"reward function `{target}` takes no option {', '.join(f'`{name}`' for name in unknown)}", hint=_close(unknown[0], named))
    return [name for name in fields if everything or name in named]


def as_values(name: str, value: Any) -> dict[str | None, float | None]:
    """What a function returned, as name of the value -> number or None; a bare number has the name None. TypeError or ValueError as `as_number`.

    >>> as_values("m:f", 1), as_values("m:f", {"short": 0.5, "kind": None})
    ({None: 1.0}, {'short': 0.5, 'kind': None})
    """
    if not isinstance(value, Mapping) or not value:
        return {None: as_number(name, value)}
    return {str(key): as_number(f"{name}` for `{key}", item) for key, item in value.items()}


def as_number(name: str, value: Any) -> float | None:
    """The value that rule or function `name` returned for one completion, as a float; None abstains. TypeError or ValueError for anything but one
    finite real number: text, lists and tensors of any shape, a coroutine that nobody awaited, nan, infinity, or beyond LIMIT."""
    if value is None:
        return None
    if isinstance(value, numbers.Real):
        try:
            number = float(value)
        except OverflowError:  # a whole number of more than 308 digits
            number = math.inf
        if not math.isfinite(number) or abs(number) > LIMIT:
            raise ValueError(f"`{name}` returned {number}, expected a finite number of at most {LIMIT:g}")
        return number
    if inspect.iscoroutine(value):
        value.close()  # or python warns that it was never awaited, at some later time and place
    awaitable = " that was not awaited (declare the function `async def`)" if isinstance(value, Awaitable) else ""
    raise TypeError(f"`{name}` must return 1 number for 1 completion, or None; got {_count(value)}{awaitable}: {_shown(value)}")


def _shown(value: Any) -> str:
    """Short, and alike for values that differ in their address alone: errors that are alike are counted together."""
    brief = reprlib.Repr()
    brief.maxother = 60
    return ADDRESS.sub("", brief.repr(value))


def _count(value: Any) -> str:
    kind = type(value).__name__
    if isinstance(value, Sized) and not isinstance(value, (str, bytes)):
        try:
            return f"{len(value)} values ({kind})"
        except TypeError:  # a tensor without dimensions
            return f"a {kind} without dimensions (`.item()` makes a number of it)"
    return f"a {kind}"


def describe(error: BaseException, place: bool = True) -> str:
    """One line about an exception of somebody's code: type, text, and, if `place`, the file and line that raised it."""
    said = words(error)
    text = ADDRESS.sub("", f"{type(error).__name__}: {said}" if said else type(error).__name__)
    frames = traceback.extract_tb(error.__traceback__)
    if place and frames:
        text += f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})"
    if "signal only works in main thread" in text:
        text += "; rewards run in threads: switch the library's own signal-based time limit off, or use the rule `math_answer`"
    return text
