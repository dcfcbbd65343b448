"""Models of the older documentation: their layers shard themselves in every mode of tensor parallelism."""

from colossal.legacy.model_zoo import gpt as gpt
from colossal.legacy.model_zoo import moe as moe
from colossal.legacy.model_zoo import vit as vit

__all__: list[str] = []
