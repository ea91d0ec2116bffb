"""One of the ranks of `ranks.Ranks`: takes calls, a line each, until there are no more."""

from __future__ import annotations

import gc
import importlib
import json
import os
import pickle
import sys
from pathlib import Path


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints goes to the log
    gc.disable()  # what imports make stays: looking through it again and again is a fifth of their time
    import deepspeed  # noqa: F401
    import torch
    import transformers.modeling_utils  # noqa: F401

    from rftcli.runtime import world as worlds

    gc.freeze()
    gc.enable()
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    world = worlds.join("gloo", folder / "rendezvous")
    for line in sys.stdin:
        number, module, calls = json.loads(line)
        functions = vars(importlib.import_module(module))
        results = {name: functions[target](world, **arguments) for name, (target, arguments) in calls.items()}
        (folder / f"result_{number}_{world.rank}").write_bytes(pickle.dumps(results))
        world.barrier(f"end of {number}")
        print(number, file=answers, flush=True)
        del results
        gc.collect()
    os._exit(0)  # no process group to leave: the others may be gone


if __name__ == "__main__":
    main()
