"""Attention that does not store its scores, chosen in the registry of Hugging Face."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from colossal._src._dtypes import HALF_DTYPES
from colossal.accelerator import get_accelerator
from colossal.errors import UnsupportedError

_OPTION = "enable_flash_attention"

# Classes of attention that a model takes when it is built: what they compute, whatever the configuration says later.
_FIXED: Mapping[str, str] = {"SamVisionAttention": "eager"}


def check_flash_attention(model: nn.Module) -> str:
    """Find the implementation of attention that a model can have."""
    parts: list[Any] = [each for each in model.modules() if hasattr(each, "set_attn_implementation")]
    if not parts:
        raise UnsupportedError(
            f"{_OPTION} chooses in the registry of Hugging Face. Found {type(model).__name__}, which is no model of "
            "it. Leave the option out, and call torch.nn.functional.scaled_dot_product_attention in the model."
        )
    wanted = "flash_attention_2" if all(map(_has_flash_package, parts)) else "sdpa"
    for part in parts:
        found = part.config._attn_implementation  # noqa: SLF001 (Hugging Face has no other name for it)
        if not (part._supports_sdpa if wanted == "sdpa" else part._supports_flash_attn):  # noqa: SLF001 (nor for these)
            raise UnsupportedError(
                f"{_OPTION} needs a model whose attention can be torch's or flash_attention_2. Found "
                f"{type(part).__name__}, which has {found!r} only. Leave the option out."
            )
        if found != wanted and not part._can_set_attn_implementation():  # noqa: SLF001 (nor for this)
            raise _is_fixed(type(part).__name__, found, wanted)
    for module in model.modules():
        fixed = _FIXED.get(type(module).__name__)
        if fixed is not None:
            raise _is_fixed(type(module).__name__, fixed, wanted)
    return wanted


def use_flash_attention(model: nn.Module) -> None:
    """Choose the attention that `check_flash_attention` finds."""
    wanted = check_flash_attention(model)
    parts: list[Any] = [each for each in model.modules() if hasattr(each, "set_attn_implementation")]
    for part in parts:
        if part.config._attn_implementation != wanted:  # noqa: SLF001
            part.set_attn_implementation(wanted)


def _has_flash_package(part: Any) -> bool:
    from transformers.utils import is_flash_attn_2_available

    tensors = list(part.parameters())
    fits = bool(tensors) and all(each.dtype in HALF_DTYPES for each in tensors)  # they may be on the host, or lazy, yet
    return fits and not get_accelerator().is_cpu and part._supports_flash_attn and is_flash_attn_2_available()  # noqa: SLF001 (as above)


def _is_fixed(name: str, found: str, wanted: str) -> UnsupportedError:
    return UnsupportedError(
        f"{_OPTION} chooses attention of a model that is there already. Found {name}, whose attention {found!r} was "
        f"chosen when it was built. Build the model with attn_implementation={wanted!r}."
    )
