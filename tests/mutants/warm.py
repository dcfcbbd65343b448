"""Runs tests in forks of a process that has imported what takes longest: ``python warm.py MODULE...``.

It says that it is ready. Each line of its input then holds the file for what pytest prints, and the arguments of
pytest; the answer is the number of the process in one line, and its exit status in the next.
"""

import importlib
import json
import os
import sys
import types

import pytest


def main(modules: list[str]) -> None:
    """Do what each line says."""
    for module in modules:
        importlib.import_module(module)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for line in sys.stdin:
        output, *words = json.loads(line)
        number = os.fork()
        if not number:
            os.setsid()
            with open(output, "wb") as file:  # noqa: PTH123 (before anything else can fail)
                for stream in (1, 2):
                    os.dup2(file.fileno(), stream)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            sys.modules["__main__"] = types.ModuleType("__main__")  # which processes of tests would run again
            sys.exit(pytest.main(words))
        sys.stdout.write(f"{number}\n")
        sys.stdout.flush()
        _, status = os.waitpid(number, 0)
        sys.stdout.write(f"{os.waitstatus_to_exitcode(status)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
