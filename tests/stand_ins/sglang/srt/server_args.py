"""The arguments of the stand-in's engine, by the names of the real one."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class ServerArgs:
    model_path: str
    load_format: str = "auto"
    dtype: str = "auto"
    trust_remote_code: bool = False
    device: str | None = None
    base_gpu_id: int = 0
    tp_size: int = 1
    context_length: int | None = None
    max_running_requests: int | None = None
    max_total_tokens: int | None = None
    mem_fraction_static: float | None = None
    disable_cuda_graph: bool = False
    skip_tokenizer_init: bool = False
    schedule_policy: str = "fcfs"
    enable_deterministic_inference: bool = False
    random_seed: int | None = None
    attention_backend: str | None = None
    sampling_backend: str | None = None
    enable_memory_saver: bool = False
    enable_weights_cpu_backup: bool = False
    custom_weight_loader: list[str] | None = None
    nccl_port: int | None = None
    custom_sigquit_handler: Any = None
    page_size: int = 1
    log_level: str = "error"
    unknown: dict[str, Any] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        if self.dtype == "float13":
            raise ValueError("Unknown dtype: float13")
