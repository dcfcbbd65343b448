"""The entries of a config that training reads: what they hold, and names that are nearly theirs."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from colossal._src._closest import closest_name
from colossal._src.interface import is_integer, is_number
from colossal.errors import ConfigError
from colossal.logging import get_dist_logger


def _is_dict(value: object) -> bool:
    return isinstance(value, Mapping)


_is_count, _is_norm = partial(is_integer, at_least=1), partial(is_number, at_least=0)
_DICT = "a dict of options"
_CHECKED: Mapping[str, tuple[Callable[[object], bool], str, str]] = {
    "fp16": (_is_dict, _DICT, "fp16=dict(mode=AMP_TYPE.TORCH)"),
    "zero": (_is_dict, _DICT, "zero=dict(model_config=dict(shard_strategy=TensorShardStrategy()))"),
    "torch_ddp": (_is_dict, _DICT, "torch_ddp=dict(find_unused_parameters=True)"),
    "clip_grad_norm": (_is_norm, "a norm of 0 (which does not clip) or more", "clip_grad_norm=1.0"),
    "gradient_accumulation": (_is_count, "a number of passes from 1 on", "gradient_accumulation=4"),
    "NUM_MICRO_BATCHES": (_is_count, "a number from 1 on", "NUM_MICRO_BATCHES=4"),
    "NUM_CHUNKS": (_is_count, "a number from 1 on", "NUM_CHUNKS=2"),
}
_OF_OTHER_LIBRARIES = {
    "gradient_clipping": "clip_grad_norm",
    "max_grad_norm": "clip_grad_norm",
    "gradient_accumulation_steps": "gradient_accumulation",
    "accumulate_grad_batches": "gradient_accumulation",
    "zero_optimization": "zero",
}
_OTHERS = ("parallel", "gradient_handler", "gradient_handlers", "cudnn_benchmark", "cudnn_deterministic")


def check_entries(config: Mapping[str, Any]) -> None:
    """Make sure that entries hold what is read from them, and name those that are nearly written like one.

    Args:
        config: Of the program; entries of its own are left alone.

    Raises:
        ConfigError: An entry holds something else.
    """
    for name, (is_right, meaning, example) in _CHECKED.items():
        value = config.get(name)
        if value is not None and not is_right(value):
            raise ConfigError(f"The entry {name} of a config is {meaning}. Found {name}={value!r}. Write {example}.")
    known = (*_CHECKED, *_OTHERS)
    for name in (each for each in config if each not in known):
        if similar := _OF_OTHER_LIBRARIES.get(name) or closest_name(name, known, typing_errors_only=True):
            get_dist_logger().warning(
                f"The config has an entry {name!r}, which training does not read; its entry is {similar!r}. Correct "
                "the name, or give an entry of your own another one.",
                ranks=[0],
            )
