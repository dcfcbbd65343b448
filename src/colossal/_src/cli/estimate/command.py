"""The command ``colossal estimate``."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from colossal._src.cli.common import SETTINGS
from colossal._src.cli.estimate.settings import PLUGINS, PRECISIONS, StepSettings

JSON_VERSION = 1
_COUNT = click.IntRange(min=1)
_SMALL = 1e8  # bytes
_ROWS = {
    "parameters": "parameter_bytes",
    "gradients": "gradient_bytes",
    "optimizer states": "optimizer_bytes",
    "buffers": "buffer_bytes",
    "activations": "activation_bytes",
    "temporary": "temporary_bytes",
    "of it in host memory": "host_bytes",
    "on the device": "device_bytes",
}


@click.command("estimate", context_settings=SETTINGS)
@click.argument("model_dir", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--plugin", type=click.Choice(PLUGINS), default="ddp", show_default=True, help="What splits the training."
)
@click.option("-n", "--ranks", type=_COUNT, required=True, help="All ranks, usually GPUs.")
@click.option("--tp", type=_COUNT, default=1, show_default=True, help="Ranks that a layer is sharded over.")
@click.option("--pp", type=_COUNT, default=1, show_default=True, help="Stages of a pipeline.")
@click.option("--sp", type=_COUNT, default=1, show_default=True, help="Ranks that a sequence is split over.")
@click.option(
    "--zero_stage", type=click.IntRange(0, 2), default=0, show_default=True, help="ZeRO of the plugin hybrid."
)
@click.option(
    "--precision", type=click.Choice(PRECISIONS), default="fp32", show_default=True, help="As of the Booster."
)
@click.option("-b", "--batch_size", type=_COUNT, help="Samples of a step, of all ranks; one for each that sees others.")
@click.option("--num_microbatches", type=_COUNT, help="Of a pipeline, whose micro-batches have one sample by default.")
@click.option("-s", "--length", type=_COUNT, help="Tokens of a sample; 2048, or the most that the model takes.")
@click.option("--offload", is_flag=True, help="Keep in host memory what the plugin can keep there.")
@click.option("--checkpoint_layers", "recompute", is_flag=True, help="Layers compute their activations again.")
@click.option("--memory", type=click.FloatRange(min=0, min_open=True), help="GB of a device, to compare with.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
def command(model_dir: Path, memory: float | None, as_json: bool, **chosen: Any) -> None:
    """Show what each rank of a training step would hold and send.

    MODEL_DIR is a directory of Hugging Face: its config.json is read, or, where there is none, the shapes in its
    safetensors files. A step with AdamW on float32 weights is planned on a fake process group, without memory for the
    model and without other ranks. Where stages of a pipeline differ, each is shown. GB are 10**9 bytes. With --memory
    it ends with 0 if the fullest rank fits, with 1 if not, and says which option to try.

    With --json it prints an object with the keys version, settings, ranks, memory, fits and hint. Sizes are in bytes;
    what is not known is null.
    """
    from colossal.errors import ColossalError

    try:
        settings = StepSettings(**chosen)
        ranks, fits, hint = _plan(settings, model_dir, memory)
    except ColossalError as error:
        raise click.ClickException(str(error)) from error
    if as_json:
        rows = [{**asdict(each), "device_bytes": each.device_bytes} for each in ranks]
        report = {"settings": asdict(settings), "ranks": rows, "memory": memory, "fits": fits, "hint": hint}
        click.echo(json.dumps({"version": JSON_VERSION, **report}, indent=2))
    else:
        _show(settings, ranks)
        if hint is not None:
            click.echo(hint)
    sys.exit(1 if fits is False else 0)


def _plan(settings: StepSettings, model_dir: Path, memory: float | None) -> tuple[list[Any], bool | None, str | None]:
    """Plan the step; say whether it fits, and what to do if not."""
    from colossal._src.cli.estimate.hints import find_fit, largest
    from colossal._src.cli.estimate.model import read_model
    from colossal._src.cli.estimate.plans import estimate

    source = read_model(model_dir)
    ranks = estimate(settings, source)
    if memory is None:
        return ranks, None, None
    most = largest(ranks)
    if most <= 1e9 * memory:
        return ranks, True, f"It fits: {most / 1e9:.2f} of {memory:g} GB."
    return ranks, False, f"{most / 1e9:.2f} GB exceed {memory:g} GB. {find_fit(settings, source, 1e9 * memory)}"


def _show(settings: StepSettings, ranks: list[Any]) -> None:
    """Print a column for each rank that differs."""
    heads = [f"rank {each.rank}" for each in ranks]
    # of a model to try things out with, GB would be zeros
    unit, size = ("GB", 1e9) if max(each.device_bytes for each in ranks) >= _SMALL else ("MB", 1e6)
    click.echo(f"plugin {settings.plugin}, {settings.ranks} ranks, {settings.precision}, {unit} per rank")
    if settings.pp > 1:
        number = settings.num_microbatches or settings.samples
        samples = settings.samples // number
        parts = f"{number} micro-batch{'es' * (number > 1)} of {samples} sample{'s' * (samples > 1)}"
        click.echo(f"{parts} (set by --batch-size and --num-microbatches)")
    columns = [f"{head:>12}" for head in heads]
    click.echo(f"{'':<22}{''.join(columns)}".rstrip())
    for label, name in _ROWS.items():
        values = [getattr(each, name) for each in ranks]
        if label != "of it in host memory" or any(values):
            _show_row(label, values, size)
    for axis in ranks[0].sent_bytes:
        _show_row(f"sent in a step, {axis}", [each.sent_bytes[axis] for each in ranks], size)
    if settings.sp > 1:
        click.echo("What ranks of the sp axis send in layers is not planned; dp holds their gradients.")


def _show_row(label: str, values: list[int | None], size: float) -> None:
    cells = ["unknown" if value is None else f"{value / size:.3f}" for value in values]
    click.echo(f"{label:<22}" + "".join(f"{cell:>12}" for cell in cells))
