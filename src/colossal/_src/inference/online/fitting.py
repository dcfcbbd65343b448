"""How long prompts and outputs are where nobody says."""

from dataclasses import replace
from typing import Any

from colossal._src.inference.config import InferenceConfig
from colossal._src.inference.model_facts import num_positions

DEFAULT_INPUT, DEFAULT_OUTPUT = 1024, 256


def fit_config(
    model_config: Any,
    config: InferenceConfig,
    *,
    max_input_len: int | None = None,
    max_output_len: int | None = None,
) -> InferenceConfig:
    """Set the lengths that were not chosen to 1,024 and 256 tokens, or to what the positions of the model leave."""
    positions: int = num_positions(model_config) or DEFAULT_INPUT + DEFAULT_OUTPUT
    if max_output_len is None:
        left = positions - max_input_len if max_input_len else positions // 2
        max_output_len = max(min(DEFAULT_OUTPUT, left), 1)
    if max_input_len is None:
        max_input_len = max(min(DEFAULT_INPUT, positions - max_output_len), 1)
    return replace(config, max_input_len=max_input_len, max_output_len=max_output_len)
