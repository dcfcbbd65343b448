"""Records what happens inside a page's process. Imports no harness: the page may have none of its packages.

Events go to one file, a `repr` of a dictionary per line, appended by one write each.
"""

import atexit
import faulthandler
import marshal
import os
import signal
import sys
import threading
import time
from builtins import getattr, isinstance, sorted, str, type  # noqa: A004, UP029 (which a page may replace)
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, FrameType, ModuleType, TracebackType
from typing import Any

from page_checks import ALWAYS_TRUE, CHECKS, Checks, ImportHook, is_library_file
from page_output import FIGURES, CapturedOutput

PROCESS_STARTS = (
    ("os", "fork"),
    ("os", "forkpty"),
    ("os", "posix_spawn"),
    ("os", "posix_spawnp"),
    ("_posixsubprocess", "fork_exec"),
)
PROCESS_EXITS = (("os", "_exit"), ("os", "abort"))
SIGNAL_CALLS = (("os", "kill"), ("os", "killpg"))
FATAL_SIGNALS = (signal.SIGABRT, signal.SIGKILL, signal.SIGTERM)
WRITE_EVENTS = ("os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.truncate")
WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
DISTRIBUTED, ASYNCIO = "torch.distributed.distributed_c10d", "asyncio.base_events"
LIBRARY = "colossal"  # which sets a finder: the hook takes its place before it again
EARLY_END = "the page ends here, before its last statement: let every rank come to its end"


class Probe:
    """Observes one process of a page: its start and end, its children, what ran in it, what failed, what it printed."""

    def __init__(self, script: str) -> None:
        self.script = script
        self.is_started = False
        self.rank = 0
        self.folder = Path()
        self.printed = CapturedOutput(self.folder)
        self.runner = 0
        self.last = -1
        self.marks: dict[str, int] = {}
        self.seen: set[int] = set()
        self.protected: tuple[str, ...] = ()
        self.checks = Checks()
        self.namespaces: list[dict[str, Any]] = []
        self.figures: dict[str, int] = {}

    def install(self) -> None:
        """Takes over the loading of the script and sets every observer; they write nothing before `start`."""
        sys.path_hooks.insert(0, lambda path: PageLoader(self, path))
        watchers = {place.partition(":")[0]: [self.checks.remember] for place in CHECKS}
        watchers |= {DISTRIBUTED: [self._observe_process_groups], ASYNCIO: [self._observe_asyncio], LIBRARY: []}
        sys.meta_path.insert(0, ImportHook(watchers))
        for table, observer in (
            (PROCESS_STARTS, self._on_process_start),
            (PROCESS_EXITS, self._on_process_exit),
            (SIGNAL_CALLS, self._on_signal_call),
        ):
            _observe_functions(table, observer)
        threading.excepthook = self._on_thread_error
        sys.unraisablehook = self._on_unraisable_error
        self.checks.remember_loaded()

    def start(self, folder: str, rank: int) -> None:
        """Begins to observe this process."""
        self.folder, self.rank, self.printed, self.is_started = Path(folder), rank, CapturedOutput(Path(folder)), True
        self.stacks = (self.folder / f"stacks.{self.rank}.{os.getpid()}").open("w")
        faulthandler.enable(self.stacks)
        faulthandler.register(signal.SIGUSR1, self.stacks, all_threads=True)
        atexit.register(self._before_exit)
        sys.addaudithook(self._on_audit_event)
        if self.rank == 0 and self.printed.is_requested:
            self.printed.redirect_stdout()
        self.record("started", main=os.path.abspath(sys.argv[0]) == self.script)  # noqa: PTH100

    def record(self, kind: str, **facts: Any) -> None:
        """Appends an event."""
        if not self.is_started:
            return
        event = {"kind": kind, "time": time.time(), "rank": self.rank, "pid": os.getpid(), **facts}
        file = os.open(self.folder / "events", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(file, f"{event!r}\n".encode())
        finally:
            os.close(file)

    def load_code(self) -> CodeType:
        """The script's code as the harness compiled it: with marks."""
        compiled = marshal.loads((self.folder / f"code.{sys.implementation.cache_tag}").read_bytes())  # noqa: S302
        self.marks = {name: number for number, name in enumerate(compiled["marks"])}
        self.last, self.protected = compiled["last"], tuple(compiled["protected"])
        return compiled["code"]

    def run(self, namespace: dict[str, Any]) -> None:
        """Executes the page in its `__main__`."""
        code, self.runner = self.load_code(), os.getpid() if namespace["__name__"] == "__main__" else 0
        namespace.update(dict.fromkeys(self.marks, False))
        namespace["__page__"] = PageCallbacks(self)
        self.namespaces.append(namespace)
        try:
            exec(code, namespace)  # noqa: S102
        except BaseException as error:
            self._record_failure(error)
            raise
        else:
            self.record("ended")
        finally:
            self.start_block(0)
            self.finish()

    @property
    def reached(self) -> set[int]:
        """The numbers of the marks that were reached so far."""
        reached = {number for space in self.namespaces for name, number in self.marks.items() if space.get(name)}
        return reached | self.seen

    def finish(self) -> None:
        """Writes which marks were reached so far, and the device in use."""
        torch = sys.modules.get("torch")
        cuda = bool(torch and hasattr(torch, "cuda") and torch.cuda.is_initialized())
        device = "cuda" if cuda else "pretend" if hasattr(torch, "pretend") else "cpu"
        self.record("finished", ran=sorted(self.reached), device=device)
        if self.rank == 0:
            self._write_module_list()

    def _before_exit(self) -> None:
        """Records what was reached, before the interpreter clears the page's modules."""
        self.record_replaced_checks()
        self.finish()
        self.seen = self.reached
        self.namespaces.clear()

    def _write_module_list(self) -> None:
        """Writes which modules of other packages are loaded, for a fork server to load them in advance."""
        if file := os.environ.get("COLOSSAL_PAGE_MODULES", ""):
            prefixes = (sys.prefix, sys.base_prefix)
            loaded = [name for name, module in list(sys.modules.items()) if _file_of(module).startswith(prefixes)]
            Path(file).write_text("\n".join(loaded), encoding="utf-8")

    def start_block(self, line: int) -> None:
        """Records that from now on what is printed belongs to the block that starts at the line; to none for line 0."""
        if os.getpid() == self.runner:
            self.record_replaced_checks()
            if self.rank == 0 and self.printed.is_requested:
                self.printed.flush()
                self.record("block", line=line, size=self.printed.size, drawn=self._new_figures())

    def record_replaced_checks(self) -> None:
        """Records, once, that the page has replaced a function that its checks use."""
        if name := self.checks.find_replaced():
            self.checks = Checks()
            self.record(
                "failed", line=self.current_line(), message=f"`{name}` was replaced, so it proves nothing: leave it"
            )

    def _new_figures(self) -> list[str]:
        """The figures in the page's folder that are new, or have changed, since this was asked last."""
        before, files = self.figures, Path(self.script).parent.glob("*.*")
        self.figures = {file.name: file.stat().st_mtime_ns for file in files if file.suffix in FIGURES}
        return [name for name, time in self.figures.items() if before.get(name) != time]

    def _record_failure(self, error: BaseException) -> None:
        if isinstance(error, SystemExit) and error.code in (None, 0):
            if self.last in self.reached:
                self.record("ended")
            else:
                self.record_error(error, f"{type(error).__name__}: {EARLY_END}")
            return
        self.record_error(error)

    def record_error(self, error: BaseException, message: str = "", kind: str = "failed") -> None:
        """Records an exception with the page's last line in its traceback."""
        line, traceback = 0, error.__traceback__
        while traceback:
            line = traceback.tb_lineno if traceback.tb_frame.f_code.co_filename == self.script else line
            traceback = traceback.tb_next
        self.record(kind, line=line, message=(message or f"{type(error).__name__}: {error}")[:4000])

    def _on_thread_error(self, arguments: threading.ExceptHookArgs) -> None:
        if arguments.exc_value and not isinstance(arguments.exc_value, SystemExit):
            self._record_nonfatal(arguments.exc_value, "in a thread")
        threading.__excepthook__(arguments)

    def _on_unraisable_error(self, arguments: Any) -> None:
        if arguments.exc_value and not _is_library_error(arguments.exc_value):
            self._record_nonfatal(arguments.exc_value, f"in {getattr(arguments.object, '__qualname__', 'a callback')}")
        sys.__unraisablehook__(arguments)

    def _observe_asyncio(self, module: ModuleType) -> None:
        loop = module.__dict__["BaseEventLoop"]
        handle = loop.call_exception_handler

        def observed(loop: Any, context: dict[str, Any]) -> None:
            error = context.get("exception")
            if error and not _is_library_error(error):
                self._record_nonfatal(error, f"in asyncio: {context.get('message', '')}")
            handle(loop, context)

        loop.call_exception_handler = observed

    def _record_nonfatal(self, error: BaseException, where: str) -> None:
        """Records an exception that ends no process."""
        self.record_error(error, f"{type(error).__name__}: {error} ({where})")

    def _observe_process_groups(self, module: ModuleType) -> None:
        """Records the backend and the size of the default process group when the page makes it."""

        def record(_none: object) -> None:
            backend = str(module.get_backend_config())
            if "fake" not in backend:  # a fake process group
                self.record("group", backend=backend, world=module.get_world_size())

        def note(_what: str, _arguments: tuple[Any, ...]) -> Callable[[Any], None]:
            return record

        module.__dict__["init_process_group"] = _observed(module.init_process_group, "init_process_group", note)

    def _on_process_start(self, _what: str, _arguments: tuple[Any, ...]) -> Callable[[Any], None]:
        line = self.current_line()
        return lambda pid: self.record("child", child=pid, line=line) if pid else None

    def _on_process_exit(self, what: str, arguments: tuple[Any, ...]) -> None:
        self.finish()
        if arguments != (0,) or os.getpid() == self.runner:
            early = f": {EARLY_END}" if arguments == (0,) else ""
            self.record("failed", line=self.current_line(), message=f"{what}({', '.join(map(repr, arguments))}){early}")

    def _on_signal_call(self, what: str, arguments: tuple[Any, ...]) -> None:
        (target, number), call = arguments, f"{what}({', '.join(map(repr, arguments))})"
        own = {os.getpid(), 0} if what == "os.kill" else {os.getpgrp()}
        above = [pid for pid in _ancestors(os.getppid()) if os.getsid(pid) != os.getsid(0)]
        groups = what == "os.killpg" or target < 0
        refused = {1, *map(os.getpgid, above)} if groups else set(above)
        if number and abs(target) in refused and self.is_started:
            self.record("failed", line=self.current_line(), message=f"{call}: a page must not signal what runs it")
            raise PermissionError(f"{call} was refused, for that is no process of the page")
        if target in own and number in FATAL_SIGNALS and signal.getsignal(number) == signal.SIG_DFL:
            self.record("failed", line=self.current_line(), message=call)

    def _on_audit_event(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[2], int) and arguments[2] & WRITE_FLAGS:
            self._record_write(arguments[0])
        elif event in WRITE_EVENTS:
            for path in arguments[: 2 if event == "os.rename" else 1]:
                self._record_write(path)

    def _record_write(self, name: Any) -> None:
        """Records that the page changes a file of the checkout, its own folder and what Python caches excepted."""
        if self.protected and isinstance(name, str | bytes | os.PathLike):
            path = os.path.abspath(os.fsdecode(name))  # noqa: PTH100
            folder = os.path.dirname(self.script)  # noqa: PTH120
            if path.startswith(self.protected) and not path.startswith(folder) and "__pycache__" not in path:
                self.record(
                    "failed", line=self.current_line(), message=f"writes {path}: a page writes into its own folder"
                )

    def current_line(self) -> int:
        """The page's line that is being executed; 0 where none is."""
        frame: FrameType | None = sys._getframe()  # noqa: SLF001
        while frame and frame.f_code.co_filename != self.script:
            frame = frame.f_back
        return frame.f_lineno if frame else 0


class PageCallbacks:
    """What the marks of a page call; see the notes on marks and on hidden failures in the harness."""

    def __init__(self, probe: Probe) -> None:
        self._probe = probe
        self.ran = probe.seen.add
        self.block = probe.start_block

    def checked(self, value: Any) -> Any:
        """Records a check whose value is always true; returns the value."""
        probe = self._probe
        probe.record_replaced_checks()
        if isinstance(value, ALWAYS_TRUE):
            message = f"this asserts a {type(value).__name__}, which is always true: call it, or compare what it gives"
            probe.record("failed", line=probe.current_line(), message=message)
        return value

    def assertion_failed(self) -> None:
        """Records the AssertionError that is being raised, once."""
        error = sys.exc_info()[1]
        if error and not getattr(error, "is_noted_by_page", False):
            error.__dict__["is_noted_by_page"] = True
            self._probe.record_error(error, kind="assertion_failed")


def _ancestors(pid: int) -> list[int]:
    """A process and its ancestors, pid 1 left out; the process alone where they are unknown."""
    found = [pid]
    with suppress(OSError, ValueError):
        while (pid := int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])) > 1:
            found.append(pid)
    return found


def _is_library_error(error: BaseException) -> bool:
    """Whether neither the page nor the project is in the traceback."""
    traceback = error.__traceback__
    while traceback and is_library_file(traceback.tb_frame.f_code.co_filename):
        traceback = traceback.tb_next
    return not traceback


def _file_of(module: ModuleType) -> str:
    return str(getattr(module, "__file__", "") or "")


def _observe_functions(
    table: tuple[tuple[str, str], ...], observer: Callable[..., Callable[[Any], None] | None]
) -> None:
    """Calls the observer before each function of the table, and what it returns after it."""
    for module_name, name in table:
        module = __import__(module_name)
        if hasattr(module, name):
            setattr(module, name, _observed(getattr(module, name), f"{module_name}.{name}", observer))


def _observed(function: Callable[..., Any], what: str, observer: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def observed(*arguments: Any, **keywords: Any) -> Any:
        after = observer(what, (*arguments, *keywords.values()))
        result = function(*arguments, **keywords)
        if after:
            after(result)
        return result

    return observed


# [Note: taking over main]
# `python page.py` asks sys.path_hooks whether the script's path is something to import from, as it does for a zip
# file. This loader accepts the page only, so the interpreter hands it `__main__`. That is the only way to wrap
# all execution of the page without changing the script or the command.


class PageLoader:
    """Loads the page as `__main__`; see [Note: taking over main]."""

    # For any other path it raises ImportError, and the import system goes on to its next hook.

    def __init__(self, probe: Probe, path: str) -> None:
        if os.path.abspath(path) != probe.script:  # noqa: PTH100
            raise ImportError
        self.probe = probe
        self.path = path

    def find_spec(self, name: str, _target: ModuleType | None = None) -> ModuleSpec | None:
        """The page holds nothing but a main module."""
        return ModuleSpec(name, self, origin=self.probe.script) if name == "__main__" else None  # type: ignore[arg-type]

    def get_code(self, _name: str) -> CodeType:
        """Code that calls back: `runpy` executes it in the main module."""
        return compile("__loader__.run(globals())", __file__, "exec")

    def run(self, namespace: dict[str, Any]) -> None:
        """Makes the main module what it is for a plain script, then runs the page."""
        is_main = namespace["__name__"] == "__main__"
        folder = [] if sys.flags.safe_path or not is_main else [str(Path(self.probe.script).parent)]
        sys.path[:] = folder + [entry for entry in sys.path if entry != self.path]
        loader = SourceFileLoader(namespace["__name__"], self.probe.script)
        namespace.update(__file__=self.probe.script, __loader__=loader, __spec__=None, __package__=None)
        if is_main:
            sys.excepthook = self._excepthook
        self.probe.run(namespace)

    def _excepthook(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Prints the traceback from the page's first frame on."""
        start = trace
        while start and start.tb_frame.f_code.co_filename != self.probe.script:
            start = start.tb_next
        sys.__excepthook__(kind, error.with_traceback(start or trace), start or trace)
