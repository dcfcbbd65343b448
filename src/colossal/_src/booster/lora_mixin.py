"""The verbs of a booster that add low-rank adapters and save them."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from colossal._src.booster.plugin.base import Plugin
from colossal.accelerator import Accelerator
from colossal.errors import UnsupportedError

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel

    from colossal._src.booster.lora import Lora


class LoraMixin:
    """What `Booster` does with adapters.

    Attributes:
        plugin: The recipe of parallelism.
    """

    plugin: Plugin
    _accelerator: Accelerator

    def enable_lora(
        self,
        model: nn.Module,
        pretrained_dir: str | Path | None = None,
        lora_config: "LoraConfig | None" = None,
        bnb_quantization_config: Any = None,
        quantize: bool = False,
    ) -> "PeftModel":
        """Freeze a model and add low-rank adapters to it, in place; call it before the optimizer is built.

        An optimizer that exists already gets the adapters at `boost`, if its groups all have the same options.

        Args:
            model: The model, before it is boosted.
            pretrained_dir: A directory with adapters to continue from, instead of `lora_config`, which may repeat their
                configuration.
            lora_config: Which layers get new adapters, and of which rank.
            bnb_quantization_config: A `transformers.BitsAndBytesConfig`: how to quantize the frozen weights; 4 bits
                by default.
            quantize: Quantize the frozen weights, on a GPU, by bitsandbytes.

        Returns:
            The model inside of a `peft.PeftModel`: build the optimizer of its parameters, and boost both.

        Raises:
            ConfigError: The arguments contradict each other, the model is boosted or has adapters already, or
                `lora_config` names layers that it does not have. The model is as it was then.
            CheckpointError: `pretrained_dir` holds no adapters, or those of another model; on all ranks.
            UnsupportedError: The plugin does not support it, peft is not installed, or the weights cannot be quantized.

        Communication: broadcast, dp, 5 KB: all ranks draw the adapters of the first one; none without a plugin.
        """
        device = self._accelerator.get_current_device()
        return self._lora.enable(model, device, pretrained_dir, lora_config, bnb_quantization_config, quantize)

    def save_lora_as_pretrained(self, model: nn.Module, checkpoint: str | Path, use_safetensors: bool = False) -> None:
        """Save the low-rank adapters of a model into a directory from which peft loads them on its own.

        Args:
            model: The model that `enable_lora` returned, boosted or not.
            checkpoint: The directory; it is created. Adapters that are there already are replaced.
            use_safetensors: Write safetensors rather than PyTorch's own format.

        Raises:
            ConfigError: The model has no adapters.
            CheckpointError: A file cannot be written; on all ranks.
            UnsupportedError: The plugin does not support it, or a package is not installed.

        Communication: as in `save_model`, three times.
        """
        self._lora.save(model, checkpoint, use_safetensors)

    @property
    def _lora(self) -> "Lora":
        lora = self.plugin.get_lora()
        if lora is None:
            raise UnsupportedError(
                f"LoRA needs a plugin that supports it. Found {type(self.plugin).__name__}, which does not yet. "
                "Use a plugin of colossal.booster.plugin, all of which do, such as TorchDDPPlugin or GeminiPlugin, or "
                "train the full model."
            )
        return lora
