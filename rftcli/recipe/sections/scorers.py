"""`models.scorers`: models and services that reward parts use by name."""

from typing import Annotated, Literal

from pydantic import Field

from rftcli.recipe.sections.base import Count, ModelPath, NonNegative, Options, Section, Target, TemplateText, Text
from rftcli.recipe.sections.quantise import Quantise
from rftcli.recipe.sections.started import StartedServer


class JudgeScore(Section):
    """How a judge's reply becomes a number: one of `regex`, `json` and `token`."""

    regex: Text | None = Field(None, description="Regular expression with one group, which holds the number; its last match in the reply counts.")
    json_: Text | None = Field(
        None, alias="json", description="Field of the reply's last JSON object, dotted for nested ones, which holds the number."
    )
    token: Text | None = Field(None, description="The score is the probability that the reply begins with this word, which is one token.")
    against: tuple[Text, ...] = Field(
        (), description="Words that `token` shares its probability with, such as `[no]` for `yes`; without any it is the one among all tokens."
    )
    scale: float = Field(1.0, description="What the number in the reply is multiplied with.")


class Placement(StartedServer):
    """Where a judge runs: at a server that is there already, or at one that the run starts on GPUs of its own and ends with itself."""

    server: Text | None = Field(None, description="Base URL of an OpenAI-compatible server, such as `http://127.0.0.1:8000/v1`.")
    gpus: NonNegative | None = Field(
        None,
        description="How many GPUs of the first rank's machine a vLLM server of the judge has for itself, none of them a rank's; 0 on a CPU. "
        "The run starts and ends it.",
    )
    tensor_parallel: Literal["auto"] | Count = Field(
        "auto", description="GPUs that share one copy of the judge; fewer than `gpus` start several servers; auto: all of them."
    )


class ScorerModel(Section):
    """A model or service that scores completions. Which keys apply depends on `kind`."""

    kind: Literal["classifier", "generative", "http", "python"] = Field(
        description="classifier: a reward model with a head. generative: a judge that replies. http: a reward service. python: a class of your own."
    )
    path: ModelPath | None = Field(None, description="Checkpoint of a classifier or judge: a directory or a hub id; at a server, its name there.")
    revision: Text | None = Field(None, description="Branch, tag or commit of a hub id; the plan holds the commit.")
    tokenizer: ModelPath | None = Field(None, description="Another tokenizer than the checkpoint's own.")
    template: TemplateText | None = Field(
        None, description="Chat template of the scorer: Jinja text, or a file that holds it; null takes its tokenizer's own, or plain text."
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="Number type of the weights; auto: bfloat16 on a GPU from Ampere on, else float32."
    )
    trust_remote_code: bool = Field(False, description="Whether code that comes with the checkpoint may run.")
    quantise: Quantise | None = Field(None, description="Weights in 4 or 8 bits, through bitsandbytes.")
    options: Options = Field({}, description="Further arguments of `from_pretrained`, of `vllm serve` with `engine: vllm`, or of a `python` class.")
    max_tokens: Count | None = Field(None, description="Longest text that is scored, in the scorer's tokens; null: the model's positions.")
    overlong: Literal["refuse", "cut_left"] = Field(
        "refuse", description="A longer text is an error of its sample, or loses its beginning, which is counted."
    )
    batch_tokens: Count = Field(
        16384, description="Tokens of one forward pass, padding included; with `engine: vllm` those that its cache holds."
    )
    offload: Literal["auto"] | bool = Field(
        "auto", description="Whether the weights wait in CPU memory between uses; auto: where the device would be too full."
    )
    shard: Literal["auto"] | bool = Field(
        "auto", description="Whether the weights are partitioned over the ranks (ZeRO-3); auto: where one device is too small for them."
    )
    head: NonNegative | Text = Field(
        0, description="Which output of a classifier is the score: an index, or an expression such as `0.5*h[0] - h[2]`."
    )
    prompt: TemplateText | None = Field(
        None,
        description="What a judge is asked: Jinja text, or a file that holds it, over prompt, messages, completion, reference, label and columns.",
    )
    score: JudgeScore | None = Field(None, description="How a judge's reply becomes a number.")
    max_new_tokens: Count = Field(256, description="Longest reply of a judge.")
    temperature: float = Field(0.0, ge=0, description="Sampling temperature of a judge; 0 is greedy.")
    samples: Count = Field(1, description="Replies of a judge whose mean is the score; more than one needs a temperature.")
    placement: Literal["shared"] | Placement = Field(
        "shared", description="shared: a judge runs on the ranks. `{gpus: n}`: the run starts it on GPUs of its own. `{server: URL}`: it is there."
    )
    engine: Literal["hf", "vllm"] = Field(
        "hf",
        description="What runs a judge on the ranks: the hf engine inside them, or vLLM in a process beside each, on its device, which pays for long "
        "replies.",
    )
    api: Literal["chat", "completions"] = Field("chat", description="Which endpoint of the server is asked.")
    preset: Literal["lightrft", "openrlhf"] = Field("openrlhf", description="Names of the fields of a reward service.")
    urls: tuple[Text, ...] = Field((), description="Addresses of a reward service; the least busy one is asked.")
    score_field: Text = Field("rewards", description="Field of a service's reply that holds one number a row.")
    batch_size: Literal["auto"] | Count = Field("auto", description="Rows of one request to a service; auto: as many as a group has samples.")
    timeout_seconds: float = Field(30.0, gt=0, description="Longest time of one try, from its start to the last byte of the reply.")
    retries: NonNegative = Field(3, description="Further tries after a failure that may pass: no connection, a timeout, status 408, 429 or 5xx.")
    concurrency: Count = Field(32, description="Requests that one rank has under way at a time.")
    per_minute: Annotated[float, Field(gt=0)] | None = Field(None, description="Most requests a minute, of all ranks together.")
    headers_env: dict[Text, Text] = Field({}, description="Header of every request to the environment variable that holds its value.")
    python: Target | None = Field(
        None, description="`module:Class`: constructed once a rank with the device and `options`; scores a batch of records."
    )
    memory_gib: float = Field(0.0, ge=0, description="Device memory that a `python` class holds, for the memory plan.")
    cache: bool = Field(
        False, description="Whether scores are kept in the run directory, so that the same text is scored once a run, also after a resume."
    )
