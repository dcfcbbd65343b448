"""``colossal run``: torchrun on one node and on many.

A job is the same program on all its hosts. The launcher opens a link to each (a pipe here, SSH elsewhere) and starts a
supervisor there, which starts torchrun. What the job prints comes back in frames; the launcher
sends heartbeats. If one side dies or loses the connection, the other one notices and ends its processes.

.. code-block:: text

    command ── hosts, job ── launcher ── node ── link ┄┄ pipe or SSH ┄┄ supervisor ── torchrun ── ranks
                                │          └─ frames, output, evidence
                                └─ outcome
"""

from colossal._src.cli.run.command import command

__all__: list[str] = []  # the command line is the interface; its help and its page describe it

assert command
