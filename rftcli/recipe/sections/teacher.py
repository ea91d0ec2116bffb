"""`models.teacher`: the model whose log-probs the policy learns from, here or behind a server."""

from typing import Annotated, Literal

from pydantic import Field

from rftcli.recipe.sections.base import Count, ModelPath, NonNegative, Section, Text
from rftcli.recipe.sections.started import StartedServer

Url = Annotated[str, Field(pattern=r"^(https?://|\$\{).+")]


class TeacherPlacement(StartedServer):
    """A server of the teacher that the run starts, and ends with itself."""

    gpus: NonNegative = Field(
        description="How many GPUs of the first rank's machine the teacher has for itself, none of them a rank's; 0 on a CPU. They share one copy."
    )


class TeacherModel(Section):
    """The model that the policy is distilled from: a model of its own beside the policy, or one behind a server."""

    path: ModelPath | None = Field(None, description="Teacher beside the policy: a directory, a hub id, or `builtin:<name>`.")
    revision: Text | None = Field(None, description="Branch, tag or commit of a hub id; null is the newest.")
    dtype: Literal["auto", "float32", "bfloat16"] = Field("auto", description="Number type of the teacher; auto: as the policy.")
    offload: Literal["auto"] | bool = Field(
        "auto", description="Whether the teacher waits in CPU memory between uses; auto: where the device would be too full."
    )
    placement: TeacherPlacement | None = Field(
        None, description="`{gpus: n}`: the run starts a vLLM server with the teacher at `path` on GPUs of its own; null: it is beside the policy."
    )
    server: Url | None = Field(None, description="Instead of `path`: address of a server that has the teacher, such as `http://host:8000`.")
    api: Literal["vllm", "echo", "sglang"] = Field(
        "vllm",
        description="How the server is asked for log-probs of given tokens: vllm, `prompt_logprobs` of /v1/completions; echo, `echo` and `logprobs` "
        "there; sglang, /generate.",
    )
    served_model: Text | None = Field(None, description="Name of the model at the server; null: the first one that it lists.")
    timeout_seconds: float = Field(120.0, gt=0, description="How long one request to the server may take.")
    retries: NonNegative = Field(4, description="How often a request that failed is sent again, with growing pauses, before the run stops.")
    concurrency: Count = Field(8, description="Requests of one rank at a time.")
    headers_env: dict[Text, Text] = Field({}, description="Header of requests -> environment variable that holds its value, on the ranks.")
