"""What a run that goes on must have as it began: its schedule, data and model, whatever the plugin and the ranks."""

import argparse
import json
from typing import Any

from torch import distributed as dist

from colossal.errors import ConfigError

KEPT = (
    *("steps", "batch_size", "lr", "warmup", "max_norm", "seed", "eval_every"),
    *("length", "pack", "lora"),  # of finetune
    *("family", "size", "dropout", "balance", "weight_decay"),  # of pretrain
)


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    found = {name: getattr(options, name) for name in KEPT if hasattr(options, name)}
    return found | {"eval_every": options.eval_every > 0}  # which leaves out samples


def save_settings(options: argparse.Namespace) -> None:
    """Write the settings of a run next to its checkpoints."""
    if dist.get_rank() == 0:
        options.output.mkdir(parents=True, exist_ok=True)
        (options.output / "settings.json").write_text(json.dumps(_settings(options), indent=2), encoding="utf-8")


def check_settings(options: argparse.Namespace) -> None:
    """Refuse to go on with others: learning rate and schedule come from the checkpoint, whatever the options say."""
    path, found = options.output / "settings.json", _settings(options)
    saved = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    dist.barrier()  # before any rank writes it anew
    changed = [name for name, value in saved.items() if name in found and found[name] != value]
    if changed:
        both = ", ".join(f"{_option(name)} {found[name]} instead of {saved[name]}" for name in changed)
        raise ConfigError(
            f"A run goes on with the settings that it began with. Found {both} in {options.output}. Pass the same, or "
            "another --output to begin a run."
        )


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")
