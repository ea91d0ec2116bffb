"""`vllm serve` of this Python, with what this version of it knows: `python -m rftcli.engines.vllm_serve MODEL --port N ...`

Beside vLLM's own arguments it takes `--graphs-up-to N`, decode steps of so many rows are captured, and it switches on the endpoint that takes and
gives ids alone where that is a choice.
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

FRONTENDS = ("vllm.entrypoints.launchers.cli_args", "vllm.entrypoints.openai.cli_args")
"""Where the server's own arguments are declared: the newer place, and the older one."""
GRAPHS = "--graphs-up-to"


def arguments(given: list[str], *, scale_out: bool, graph_size: bool) -> list[str]:
    """What `vllm serve` is called with. `scale_out`: it has that switch; `graph_size`: it takes the largest graph as one number."""
    found = list(given)
    if GRAPHS in found:
        at = found.index(GRAPHS)
        most = int(found[at + 1])
        sizes = [1, 2, 4, *range(8, min(most, 256) + 1, 8), *range(272, most + 1, 16)]
        graphs = {"max_cudagraph_capture_size": most} if graph_size else {"cudagraph_capture_sizes": sizes}
        found[at : at + 2] = ["--compilation-config", json.dumps(graphs)]
    return [*found, "--enable-scale-out"] if scale_out else found


def main() -> None:
    from vllm.config import CompilationConfig
    from vllm.entrypoints.cli.main import main as vllm_main

    known = next((module for name in FRONTENDS if (module := _module(name)) is not None), None)
    fields = {} if known is None else known.FrontendArgs.__dataclass_fields__
    graph_size = "max_cudagraph_capture_size" in CompilationConfig.__dataclass_fields__
    sys.argv = ["vllm", "serve", *arguments(sys.argv[1:], scale_out="enable_scale_out" in fields, graph_size=graph_size)]
    vllm_main()


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


if __name__ == "__main__":
    main()
