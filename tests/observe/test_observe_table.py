"""The table of observers, and that none of them costs anything before it is used."""

import subprocess
import sys
from importlib import import_module

import pytest

from rftcli.errors import UsageError
from rftcli.observe.plain import Plain
from rftcli.observe.table import OBSERVERS, make_observer


@pytest.mark.parametrize("name", OBSERVERS)
def test_every_row_names_an_observer(name):
    module, attribute = OBSERVERS[name].split(":")
    cls = getattr(import_module(module), attribute)
    assert callable(cls.see)
    assert callable(cls.close)


def test_make_observer(tmp_path):
    assert isinstance(make_observer("plain", tmp_path), Plain)
    with pytest.raises(UsageError, match="mlflow") as caught:
        make_observer("mlflow", tmp_path)
    assert "tensorboard" in caught.value.hint


def test_importing_observers_loads_nothing_heavy():
    modules = sorted(
        {row.split(":")[0] for row in OBSERVERS.values()} | {f"rftcli.observe.{m}" for m in ("follow", "tracker", "history", "lessons", "table")}
    )
    code = f"""
import importlib, sys
for module in {modules!r}:
    importlib.import_module(module)
heavy = {{"torch", "transformers", "deepspeed", "vllm", "numpy", "wandb", "tensorboard", "rich"}} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
