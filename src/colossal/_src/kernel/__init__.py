"""Arithmetic, copies and files where the way they are done matters: fast implementations, and what takes their place.

The names are loaded when they are first used: most programs need few of them.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from colossal._src.kernel.adam import AdamStep, AdamTensors, adam_step
    from colossal._src.kernel.attention import PAGED_DTYPES, PagedTokens, has_paged_attention, paged_attention
    from colossal._src.kernel.memory import huge_zeros, stream_copy
    from colossal._src.kernel.norm import FUSED_DTYPES, has_fused_modules, rms_norm
    from colossal._src.kernel.panels import has_packed_product, packed_product, to_panels, to_rows
    from colossal._src.kernel.rotary import rotate_heads
    from colossal._src.kernel.silu import gated_silu, has_gate_kernel, silu_product, write_gate

_MODULE_OF = {
    "AdamStep": "colossal._src.kernel.adam",
    "AdamTensors": "colossal._src.kernel.adam",
    "FUSED_DTYPES": "colossal._src.kernel.norm",
    "PAGED_DTYPES": "colossal._src.kernel.attention",
    "PagedTokens": "colossal._src.kernel.attention",
    "adam_step": "colossal._src.kernel.adam",
    "gated_silu": "colossal._src.kernel.silu",
    "has_fused_modules": "colossal._src.kernel.norm",
    "has_gate_kernel": "colossal._src.kernel.silu",
    "has_packed_product": "colossal._src.kernel.panels",
    "has_paged_attention": "colossal._src.kernel.attention",
    "huge_zeros": "colossal._src.kernel.memory",
    "packed_product": "colossal._src.kernel.panels",
    "paged_attention": "colossal._src.kernel.attention",
    "rms_norm": "colossal._src.kernel.norm",
    "rotate_heads": "colossal._src.kernel.rotary",
    "silu_product": "colossal._src.kernel.silu",
    "stream_copy": "colossal._src.kernel.memory",
    "to_panels": "colossal._src.kernel.panels",
    "to_rows": "colossal._src.kernel.panels",
    "write_gate": "colossal._src.kernel.silu",
}


__all__ = [
    "FUSED_DTYPES",
    "PAGED_DTYPES",
    "AdamStep",
    "AdamTensors",
    "PagedTokens",
    "adam_step",
    "gated_silu",
    "has_fused_modules",
    "has_gate_kernel",
    "has_packed_product",
    "has_paged_attention",
    "huge_zeros",
    "packed_product",
    "paged_attention",
    "rms_norm",
    "rotate_heads",
    "silu_product",
    "stream_copy",
    "to_panels",
    "to_rows",
    "write_gate",
]


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'colossal.kernel' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
