"""A policy of a run as a directory of its own, which `from_pretrained` loads: copied, or converted tensor by tensor.

Never writes over anything: the directory appears whole, under its name, at the end. Loads no model; a conversion reads one tensor at a time.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rftcli.errors import RftError, UsageError
from rftcli.runtime import disk
from rftcli.runtime.rundir import COMMITTED, RunDir, step_name, step_number

# How to add one: what may be asked for, and the folder of a checkpoint that holds it.
FOLDERS = {"policy": "policy", "merged": "policy", "adapter": "adapter", "ema": "ema"}
DTYPES = ("float32", "bfloat16", "float16")
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    source: Path
    out: Path
    bytes: int


def export(target: Path, out: Path, *, what: str = "policy", dtype: str | None = None, step: int | None = None) -> Exported:
    """Copy the `what` of a checkpoint or run directory to `out`. UsageError for what is not there, for an `out` that is in use, and for unknown
    words; RftError when it cannot be written."""
    if what not in FOLDERS:
        raise UsageError(f"--what {what} is unknown", hint=f"one of {', '.join(FOLDERS)}")
    if dtype is not None and dtype not in DTYPES:
        raise UsageError(f"--dtype {dtype} is unknown", hint=f"one of {', '.join(DTYPES)}")
    if out.exists() or out.is_symlink():
        raise UsageError(f"{out} is there already, and nothing is written over", hint="name a directory that does not exist")
    source = find(target, what=what, step=step)
    fresh = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        fresh.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(source, fresh, ignore=None if dtype is None else shutil.ignore_patterns("*.safetensors", INDEX))
        if dtype is not None:
            _convert(source, fresh, dtype)
        fresh.rename(out)
    except OSError as error:
        hint = f"free space (`df -h {out.parent}`)" if disk.is_full(error) else "name another directory to write to"
        raise RftError(f"{out} cannot be written: {error.strerror or error}", hint=hint) from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return Exported(source=source, out=out, bytes=sum(item.stat().st_size for item in out.rglob("*") if item.is_file()))


def find(target: Path, *, what: str, step: int | None) -> Path:
    """The folder that holds it: of a checkpoint, or of a run (its `final/` for a finished policy, else the newest checkpoint or that of `step`)."""
    run = RunDir(target)
    if (target / COMMITTED).is_file():
        if step is not None:
            raise UsageError("--step is for run directories", hint=f"{target} is a checkpoint")
        checkpoint = target
    elif what == "policy" and step is None and (run.final / "config.json").is_file():
        return run.final
    else:
        checkpoint = pick(run, step)
    folder = checkpoint / FOLDERS[what]
    lacking = what == "merged" and not (checkpoint / "adapter").is_dir()
    if not folder.is_dir() or lacking:
        there = sorted({name for name, path in FOLDERS.items() if name != "merged" and (checkpoint / path).is_dir()})
        reason = "has no adapter, so nothing was merged" if lacking else f"holds no {FOLDERS[what]}/"
        save = "; checkpoint.save_hf was false" if what == "policy" else ""
        raise UsageError(f"{checkpoint} {reason}{save}", hint=f"--what {' or '.join(there)}" if there else "export another checkpoint")
    return folder


def pick(run: RunDir, step: int | None) -> Path:
    """The checkpoint of `step`, or the newest. UsageError with those that are there."""
    whole = run.committed_checkpoints()
    if not whole:
        raise UsageError(
            f"{run.path} is neither a whole checkpoint nor a run directory with one", hint="give runs/<name>/checkpoints/step_NNNNNN or runs/<name>"
        )
    if step is None:
        return whole[-1]
    folder = run.checkpoints / step_name(step)
    if folder not in whole:
        there = ", ".join(map(str, sorted(map(step_number, whole))))
        raise UsageError(f"there is no whole checkpoint of step {step}", hint=f"whole checkpoints: {there}")
    return folder


def _convert(source: Path, out: Path, dtype: str) -> None:
    """Every floating-point tensor of every weight file in `dtype`; names, files and metadata stay."""
    import torch
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import save_file

    wanted, total = getattr(torch, dtype), 0
    files = sorted(source.glob("*.safetensors"))
    if not files:
        raise UsageError(f"{source} holds no safetensors, so --dtype has nothing to convert")
    for path in files:
        tensors: dict[str, Any] = {}
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - the handle is no mapping
                tensor = file.get_tensor(name)
                tensors[name] = tensor.to(wanted) if tensor.is_floating_point() else tensor
                total += tensors[name].numel() * tensors[name].element_size()
            metadata = file.metadata()
        try:
            save_file(tensors, out / path.name, metadata=metadata)
        except SafetensorError as error:  # how safetensors tells of a full disk
            raise OSError(str(error)) from error
        shutil.copymode(path, out / path.name)
    if (source / INDEX).is_file():
        index = json.loads((source / INDEX).read_text(encoding="utf-8"))
        index.setdefault("metadata", {})["total_size"] = total
        (out / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    config = out / "config.json"
    if config.is_file():
        data = json.loads(config.read_text(encoding="utf-8"))
        for key in {"dtype", "torch_dtype"} & set(data) or {"dtype"}:
            data[key] = dtype
        config.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
