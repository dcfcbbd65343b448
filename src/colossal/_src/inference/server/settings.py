"""What a server is asked for, in plain data."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

LOG_LEVELS = ("critical", "error", "warning", "info", "debug", "trace")


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Where a server listens, what it serves, and its limits."""

    model: Any = None  # directory of Hugging Face, or a loaded model
    tokenizer: str | Path | None = None  # directory; None for that of the model
    model_name: str = "model"  # what clients call the model
    host: str = "127.0.0.1"
    port: int = 8020
    log_level: str = "info"
    allow_cors: bool = False  # whether pages of other servers may ask
    dtype: torch.dtype | None = None  # of the parameters; None for that of the files
    tp_size: int = 1
    pp_size: int = 1
    max_batch_size: int = 16  # sequences of a step
    max_input_len: int | None = None  # tokens; None for what the positions of the model leave
    max_output_len: int | None = None
    num_blocks: int | None = None  # pages; None for as many as the longest sequences need
    queue_size: int = 256  # outputs that wait, besides those that run
    cache_size: int = 0  # queries of /generation whose results are kept
    cache_list_size: int = 1  # results of each
    timeout_seconds: float = 600.0  # for a request, its time in the queue included
    step_timeout_seconds: float = 120.0  # for a step of the model; one that takes longer hangs
    grace_seconds: float = 60.0  # for running requests when the server is stopped
    max_body_bytes: int = 2**20
