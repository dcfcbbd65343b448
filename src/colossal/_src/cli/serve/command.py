"""The command ``colossal serve``."""

import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from colossal._src.cli.common import SETTINGS
from colossal._src.cli.serve.rank_processes import RankProcesses, obey_the_first

_COUNT = click.IntRange(min=1)
_SECONDS = click.FloatRange(min=0, min_open=True)
_DTYPES = ("float32", "bfloat16", "float16")
_NEEDED = ("fastapi", "uvicorn", "prometheus_client", "transformers", "pydantic", "starlette")


@click.command("serve", context_settings=SETTINGS)
@click.argument("source", metavar="DIR_OR_CONFIG", type=click.Path(exists=True, path_type=Path))
@click.option("--host", help="Where it listens; 127.0.0.1, or what the configuration file says.")
@click.option("--port", type=click.IntRange(0, 65535), help="8020, or what the configuration file says.")
@click.option("--model_name", help="What clients call the model; the name of its directory.")
@click.option("--tokenizer", type=click.Path(exists=True, path_type=Path), help="Its directory; that of the model.")
@click.option("--dtype", type=click.Choice(_DTYPES), help="Of the parameters; that of their files.")
@click.option("--tp", "tp_size", type=_COUNT, help="Ranks that shard the model; 1.")
@click.option("--pp", "pp_size", type=_COUNT, help="Stages of the model, each on the ranks of --tp; 1.")
@click.option("--max_batch_size", type=_COUNT, help="Sequences that are computed together; 16.")
@click.option("--max_input_len", type=_COUNT, help="Tokens of a prompt; what the positions leave, at most 1024.")
@click.option("--max_output_len", type=_COUNT, help="Tokens of an output; 256, or half of the positions.")
@click.option("--num_blocks", type=_COUNT, help="Pages of 16 tokens; as many as the longest sequences need.")
@click.option("--queue_size", type=click.IntRange(min=0), help="Outputs that wait; 256. Others are answered by 429.")
@click.option("--timeout", "timeout_seconds", type=_SECONDS, help="Seconds that a request may take; 600.")
@click.option("--step_timeout", "step_timeout_seconds", type=_SECONDS, help="Seconds that a step may take; 120.")
@click.option("--grace", "grace_seconds", type=_SECONDS, help="Seconds for running requests after SIGTERM; 60.")
@click.option("--max_body", "max_body_bytes", type=_COUNT, help="Bytes of a request; 1048576.")
@click.pass_context
def command(context: click.Context, source: Path, **chosen: Any) -> None:
    """Answer requests over HTTP with a language model.

    DIR_OR_CONFIG is a directory of Hugging Face with a model and its tokenizer, or the Python configuration file of an
    OPT service. Routes are those of OpenAI, /v1/completions, /v1/chat/completions and /v1/models; /generation; /health
    and /metrics; and /docs, which describes them all.

    With --tp and --pp several processes of this machine shard the model; the command starts them, and ends them. If one
    is lost, or hangs for longer than --step_timeout, all requests are answered by 503, and /health says why.

    After SIGTERM running requests are finished, and others answered by 503. It ends with 1 if a step of the model has
    failed.
    """
    import torch

    from colossal.errors import ColossalError

    try:
        from colossal._src.inference.server import ServerSettings, load_engine, read_config_file, run_server
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _NEEDED:
            raise
        message = (
            "Serving needs fastapi, uvicorn, prometheus-client and transformers, which the extra `serve` brings. "
            f"Found no {error.name}. In the clone, run: pip install -e '.[serve]'"
        )
        raise click.ClickException(message) from error
    try:
        if source.is_dir():
            settings = ServerSettings(model=source, model_name=source.resolve().name)
        else:
            settings = read_config_file(source)
        if chosen["dtype"] is not None:
            chosen["dtype"] = getattr(torch, chosen["dtype"])
        settings = replace(settings, **{name: value for name, value in chosen.items() if value is not None})
        ranks = None
        if settings.tp_size * settings.pp_size > 1:
            ranks = _join_ranks(settings.tp_size * settings.pp_size, context)
        engine = load_engine(settings)
        if not engine.takes_requests:
            engine.follow()
            return
    except ColossalError as error:
        raise click.ClickException(str(error)) from error
    has_worked = run_server(engine, settings, watch=None if ranks is None else ranks.watch)
    if ranks is not None:
        ranks.end(at_once=not has_worked)
    sys.exit(0 if has_worked else 1)


def _join_ranks(size: int, context: click.Context) -> RankProcesses | None:
    """Form the process group of the ranks; return those that were started, if no launcher has started them."""
    from colossal._src.cluster import launch_from_torch

    ranks = None
    if "WORLD_SIZE" not in os.environ:
        ranks = RankProcesses(size, list(_words(context)))
    elif os.environ.get("RANK") != "0":
        obey_the_first()
    launch_from_torch(verbose=False)
    return ranks


def _words(context: click.Context) -> Iterator[str]:
    """The arguments of this command once more."""
    for parameter in context.command.params:
        value = context.params.get(parameter.name or "")
        if value is not None:
            yield from (str(value),) if isinstance(parameter, click.Argument) else (parameter.opts[-1], str(value))
