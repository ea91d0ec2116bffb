"""The server of this Python's vLLM, with what this version of it knows: `python -m rftcli.engines.vllm_serve MODEL --port N ...`

Beside vLLM's own arguments it takes `--graphs-up-to N`, decode steps of so many rows are captured, and it switches on the endpoint that takes and
gives ids alone where that is a choice. Its engine takes several decode steps for a turn of the scheduler (`vllm_decode`): vLLM starts the engine's
process by `spawn`, which runs this module there too, under a name of its own.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
from typing import Any

from rftcli.engines.vllm_decode import quicken_engines_to_come
from rftcli.engines.vllm_settings import compilation

FRONTENDS = ("vllm.entrypoints.launchers.cli_args", "vllm.entrypoints.openai.cli_args")
"""Where the server's own arguments are declared: the newer place, and the older one."""
SERVERS = ("vllm.entrypoints.launchers.api_server.entry", "vllm.entrypoints.openai.api_server")
"""Where it is run, likewise."""
GRAPHS = "--graphs-up-to"
COMPILATION = "--compilation-config"


def arguments(given: list[str], *, scale_out: bool, graph_size: bool) -> list[str]:
    """What `vllm serve` is called with. `scale_out`: it has that switch; `graph_size`: it takes the largest graph as one number."""
    found = list(given)
    if GRAPHS in found:
        at = found.index(GRAPHS)
        most, own = int(found[at + 1]), dict[str, Any]()
        del found[at : at + 2]
        if COMPILATION in found:
            at = found.index(COMPILATION)
            own = json.loads(found[at + 1])
            del found[at : at + 2]
        found[at:at] = [COMPILATION, json.dumps(compilation(most, own, one_number=graph_size))]
    return [*found, "--enable-scale-out"] if scale_out else found


def main() -> None:
    """vLLM's own command asks for the metadata of a package named `vllm`, which its CPU builds do not have: its parts are called instead."""
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # as its command does
    import uvloop
    from vllm.config import CompilationConfig
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    frontend, server = _first(FRONTENDS), _first(SERVERS)
    graph_size = "max_cudagraph_capture_size" in CompilationConfig.__dataclass_fields__
    given = arguments(sys.argv[1:], scale_out="enable_scale_out" in frontend.FrontendArgs.__dataclass_fields__, graph_size=graph_size)
    asked = frontend.make_arg_parser(FlexibleArgumentParser()).parse_args(given)
    asked.model = asked.model_tag
    frontend.validate_parsed_serve_args(asked)
    uvloop.run(server.run_server(asked))


def _first(names: tuple[str, ...]) -> Any:
    """The first of these modules that this vLLM has."""
    for name in names[:-1]:
        with contextlib.suppress(ImportError):
            return importlib.import_module(name)
    return importlib.import_module(names[-1])


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__":
    quicken_engines_to_come()
