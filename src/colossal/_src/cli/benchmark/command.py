"""The command ``colossal benchmark``."""

import json
import math
from dataclasses import asdict
from typing import Any

import click
from click.core import ParameterSource

from colossal._src.cli.benchmark.settings import DTYPES, LinkSettings, Settings
from colossal._src.cli.common import SETTINGS

JSON_VERSION = 1
OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "p2p")
AXES = ("pp", "dp", "sp", "tp")
_LINKS_ONLY = (*AXES, "ops", "min_bytes", "max_bytes", "seconds", "output")
_CASES_ONLY = ("batch_size", "seq_len", "hidden_dim", "layers", "dtype", "warmup_steps", "profile_steps")
_COUNT = click.IntRange(min=1)
_POSITIVE = click.FloatRange(min=0, min_open=True)


@click.command("benchmark", context_settings=SETTINGS)
@click.option("-g", "--gpus", "--ranks", "ranks", type=_COUNT, help="Ranks; as many as there are GPUs, or 2 on a CPU.")
@click.option("--device", help="cpu, or the accelerator as torch calls it, such as cuda; that one if there is one.")
@click.option("-b", "--batch_size", type=_COUNT, default=8, show_default=True, help="Samples in a batch.")
@click.option("-s", "--seq_len", type=_COUNT, default=128, show_default=True, help="Length of a sample.")
@click.option("-d", "--hidden_dim", type=_COUNT, default=256, show_default=True, help="Width of a layer.")
@click.option("-l", "--layers", type=_COUNT, default=2, show_default=True, help="Blocks of two linear layers.")
@click.option("--dtype", type=click.Choice(DTYPES), default="float32", show_default=True, help="Type of all tensors.")
@click.option("-w", "--warmup_steps", type=_COUNT, default=3, show_default=True, help="Steps before the measured ones.")
@click.option("-p", "--profile_steps", type=_COUNT, default=10, show_default=True, help="Measured steps.")
@click.option("--collectives", is_flag=True, help="Measure the links between ranks instead, and write a file.")
@click.option("--pp", type=_COUNT, help="Ranks on the axis of pipeline stages.")
@click.option("--dp", type=_COUNT, help="Ranks on the data-parallel axis.")
@click.option("--sp", type=_COUNT, help="Ranks that a sequence is split over.")
@click.option("--tp", type=_COUNT, help="Ranks that a tensor is sharded over.")
@click.option("--op", "ops", type=click.Choice(OPS), multiple=True, help="An operation to measure, several times; all.")
@click.option("--min_bytes", type=_COUNT, default=1024, show_default=True, help="Smallest tensor.")
@click.option("--max_bytes", type=_COUNT, default=4 * 2**20, show_default=True, help="Largest tensor.")
@click.option("--seconds", type=_POSITIVE, default=0.25, show_default=True, help="Time for an operation and a size.")
@click.option("-o", "--output", default="link_cost.json", show_default=True, help="The file of the links.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
@click.option("--timeout", type=_POSITIVE, default=600.0, show_default=True, help="Seconds that a job may take.")
@click.pass_context
def command(context: click.Context, /, collectives: bool, **chosen: Any) -> None:
    """Measure linear layers in parallel.

    A matrix product and a training step of a small MLP, with input of shape (batch_size, seq_len, hidden_dim): on one
    rank, in data parallelism, and in tensor parallelism of every mode that the ranks fit; of those with the same batch
    the fastest is marked. With --collectives: what a message costs along each axis of a mesh, alpha and
    beta, in a file that the mesh reads. Starts its ranks by itself, or runs in those that torchrun has started:
    torchrun --nproc_per_node=4 -m colossal.cli benchmark.

    With --json it prints an object with the keys version, settings and rows; with --collectives one with the keys
    version, output, axes and origin. Times are in seconds.
    """
    _refuse(context, _CASES_ONLY if collectives else _LINKS_ONLY, collectives=collectives)
    (_links if collectives else _cases)(chosen)


def _refuse(context: click.Context, names: tuple[str, ...], *, collectives: bool) -> None:
    given = [name for name in names if context.get_parameter_source(name) == ParameterSource.COMMANDLINE]
    if given:
        there = "without" if collectives else "with"
        raise click.UsageError(f"--{given[0].replace('ops', 'op')} has a meaning only {there} --collectives.")


def _cases(chosen: dict[str, Any]) -> None:
    from colossal._src.cli.benchmark.cases import cases_of
    from colossal._src.cli.benchmark.measure import is_fastest, speedup_of
    from colossal._src.cli.benchmark.run_ranks import outer_world_size, run_cases
    from colossal._src.cli.benchmark.show import show_cases

    device = _device(chosen["device"])
    ranks = _ranks(chosen["ranks"], device, outer_world_size())
    settings = Settings(ranks, device=device, **{name: chosen[name] for name in _CASES_ONLY})
    sizes = sorted({case.size for case in cases_of(settings)})
    results = run_cases(settings, sizes, chosen["timeout"])
    if results is None:
        return
    if chosen["as_json"]:
        rows = [
            {**asdict(one), "speedup": speedup_of(one, results), "fastest": is_fastest(one, results)} for one in results
        ]
        click.echo(json.dumps({"version": JSON_VERSION, "settings": asdict(settings), "rows": rows}, indent=2))
    else:
        shape = f"({settings.batch_size}, {settings.seq_len}, {settings.hidden_dim})"
        show_cases(results, f"input {shape}, {settings.layers} blocks, {settings.dtype}, {device}")


def _links(chosen: dict[str, Any]) -> None:
    from colossal._src.cli.benchmark.run_ranks import outer_world_size, run_links, working_path
    from colossal._src.cli.benchmark.show import show_links
    from colossal._src.cluster import LinkCost

    device = _device(chosen["device"])
    shape = _shape(chosen, device, outer_world_size())
    output = working_path(chosen["output"])
    sizes = _sizes(chosen["min_bytes"], chosen["max_bytes"])
    settings = LinkSettings(shape, list(chosen["ops"] or OPS), sizes, chosen["seconds"], device, output)
    if not run_links(settings, chosen["timeout"]):
        return
    costs = LinkCost.load(output)
    assert costs.origin
    if chosen["as_json"]:
        click.echo(json.dumps({"version": JSON_VERSION, "output": output, **asdict(costs)}, indent=2))
    else:
        origin = costs.origin
        show_links(costs, f"{origin.backend} on {origin.device}, {origin.world_size} ranks, {', '.join(origin.hosts)}")
        click.echo(f"Written to {output}. Let a mesh read it: export COLOSSAL_LINK_COST={output}")


def _device(given: str | None) -> str:
    from colossal.accelerator import get_accelerator
    from colossal.errors import ConfigError

    try:
        return get_accelerator(given).name
    except ConfigError as error:
        raise click.BadParameter(str(error), param_hint="--device") from error


def _ranks(given: int | None, device: str, outer: int | None) -> int:
    """How many ranks there are, or shall be."""
    from colossal.accelerator import get_accelerator

    if outer is not None:
        if given not in (None, outer):
            raise click.BadParameter(f"the launcher has started {outer}, not {given}", param_hint="--ranks")
        return outer
    accelerator = get_accelerator(device)
    if accelerator.is_cpu:
        return given or 2
    count = accelerator.device_count()
    if given is not None and given > count:
        raise click.BadParameter(f"each rank needs a device of its own, and there are {count}", param_hint="--ranks")
    return given or count


def _shape(chosen: dict[str, Any], device: str, outer: int | None) -> dict[str, int]:
    """The size of each axis; dp takes the ranks that the others leave."""
    given = {axis: chosen[axis] for axis in AXES if chosen[axis]}
    taken = math.prod(given.values())
    wanted = chosen["ranks"] or (taken if taken > 1 and outer is None else None)
    ranks = _ranks(wanted, device, outer)
    if "dp" not in given and ranks % taken == 0:
        given["dp"] = ranks // taken
    elif taken != ranks:
        sizes = " x ".join(f"{axis} {size}" for axis, size in given.items())
        raise click.BadParameter(f"the axes {sizes} make {taken} ranks, not {ranks}", param_hint="--ranks")
    if ranks == 1:
        raise click.BadParameter("a link has two ends: ask for 2 ranks or more", param_hint="--ranks")
    return {axis: given.get(axis, 1) for axis in AXES}


def _sizes(least: int, most: int) -> list[int]:
    """Each four times the one before."""
    if most < 4 * least:
        raise click.BadParameter(f"a line needs two points: at least {4 * least}", param_hint="--max_bytes")
    return [least * 4**power for power in range(int(math.log(most / least, 4) + 1e-9) + 1)]
