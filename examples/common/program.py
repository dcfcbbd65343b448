"""How the programs begin and end: errors that say what to do are shown as one sentence, without a traceback."""

import argparse
import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

from torch.distributed.elastic.multiprocessing.errors import get_error_handler

import colossal
from colossal.booster import Booster
from colossal.errors import (
    CheckpointError,
    ConfigError,
    LaunchError,
    MeshError,
    NonFiniteError,
    UnsupportedError,
)

OF_USE = (CheckpointError, ConfigError, LaunchError, MeshError, NonFiniteError, UnsupportedError)
"""Errors that another option, model or file cures; others keep their traceback."""


class OptionError(Exception):
    """Options that do not exist, lack, or contradict each other."""


class Parser(argparse.ArgumentParser):
    """A parser whose errors do not repeat all options."""

    def error(self, message: str) -> NoReturn:
        """Refuse the command line."""
        raise OptionError(f"{message}. --help shows all options.")


def run_program(parse: Callable[[], argparse.Namespace], run: Callable[[argparse.Namespace], None]) -> None:
    """Read the command line, join the other ranks, and run.

    Args:
        parse: Reads the command line.
        run: Does what the options say.
    """
    options = None
    try:
        options = parse()
        colossal.launch_from_torch(verbose=False)
        run(options)
    except (OptionError, *OF_USE) as error:
        error.__cause__ = error.__context__ = None
        get_error_handler().record_exception(error.with_traceback(None))  # with which torchrun ends its report
        _end(str(error), 2 if isinstance(error, OptionError) else 1)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal and torchrun send one each
        _end(_how_to_go_on(options), 128 + signal.SIGINT)


def _end(message: str, code: int) -> NoReturn:
    """End this process; one on each node says why, as all of them end for the same reason."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        sys.stderr.write(f"{message}\n")
    sys.exit(code)


def _how_to_go_on(options: argparse.Namespace | None) -> str:
    step = None if options is None else Booster().latest_step(options.output / "checkpoints")
    if step is None:
        return "Stopped. No checkpoint was saved: the run begins anew. --save-every saves some."
    return f"Stopped. To go on after step {step}, run the same command with --resume."
