"""The command line: `python docs_test.py NAME ...`."""

import argparse
import signal
import sys
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, TextIO

from pagetest.finding import counted, shown
from pagetest.graph.affected import Affected
from pagetest.graph.changes import changed_files
from pagetest.graph.fingerprint import common_inputs
from pagetest.graph.imports import ImportGraph
from pagetest.model.tree import LANGUAGES, Tree, UnknownPageError
from pagetest.options import make_parser
from pagetest.results.fitting import Fitting, changed_since
from pagetest.results.readme import Count
from pagetest.results.recorder import Recorder, run_facts
from pagetest.results.records import RECORDS, Records
from pagetest.results.report import extremes, lines_of, summary
from pagetest.results.result import Result
from pagetest.results.selection import Selection, is_wanted, select
from pagetest.run.device import CUDA, DEVICES, Device
from pagetest.run.exempt import exempt_on
from pagetest.run.live import is_terminal
from pagetest.run.runner import Runner
from pagetest.suite import Suite
from pagetest.usage import UsageError
from pagetest.warm.watch import Watch

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130
NUM_REASONS = 3
NUM_JOBS = 2


def main(arguments: Sequence[str], root: Path) -> int:
    """Runs, checks or lists pages.

    Args:
        arguments: The words of the command line.
        root: The project's root; pages are built below it.

    Returns:
        0 if all is well, 1 if a page failed, 2 for a wrong call, 130 after an interruption.
    """
    options = make_parser(root).parse_args(arguments)
    options.all |= options.record and not (options.names or options.affected)
    tree = Tree(options.source.resolve())
    languages = LANGUAGES if options.lang == "all" else (options.lang,)
    suite = Suite(tree, languages, root / "src", options.update_outputs)
    try:
        names = _names(options, tree, root)
        if not names:
            _say(f"no page is affected by what differs from {options.affected}")
            return OK
        if options.check or options.list:
            return _list(suite, names) if options.list else _check(suite, tuple(names), root)
        if options.translations or options.ack:
            return _acknowledge(suite, tuple(names)) if options.ack else _translations(suite, tuple(names))
        with _stoppable():
            return _run(suite, tuple(names), options, root)
    except UsageError as error:
        _say(f"docs_test.py: {error}", to=sys.stderr)
        return USAGE
    except KeyboardInterrupt:
        _say("interrupted; the page's processes are gone", to=sys.stderr)
        return INTERRUPTED


def _names(options: argparse.Namespace, tree: Tree, root: Path) -> Mapping[str, Sequence[str]]:
    """The pages that are meant, each with the reasons why."""
    if not tree.names:
        raise UnknownPageError(f"{tree.source} holds no page in {' or '.join(LANGUAGES)}: give the tree by --source")
    if sum(map(bool, (options.names, options.all, options.affected))) > 1:
        raise UsageError("give one of names, --all and --affected")
    if options.names:
        return {tree.resolve(name): () for name in options.names}
    if options.affected:
        return Affected(tree, root, changed_files(root, options.affected)).reasons
    if not (options.all or options.list or options.check or options.translations or options.ack):
        raise UnknownPageError("give the name of a page, or --all; --list shows all pages")
    return dict.fromkeys(tree.names, ())


def _run(suite: Suite, names: Sequence[str], options: Any, root: Path) -> int:
    device = Device(options.device)
    if device.fault:
        raise UsageError(device.fault)
    if not options.names:
        names = _say_exempt(names, device)
    build = options.build.resolve()
    published, facts = Records(suite.tree.source.with_name(RECORDS)), run_facts(root, device.asked)
    kept = published if options.record else None
    recorder = Recorder(Records(build.with_name(RECORDS)), device, root, facts, kept)
    selection = Selection({}, frozenset())
    if options.all and is_wanted():
        fitting = Fitting([published], suite.tree, ImportGraph(suite.code), device.expected, facts)
        selection = select(names, suite.languages, fitting, facts["commit"])
    is_live = len(names) == 1 and is_terminal() and not (options.quiet or options.verbose)
    runner = Runner(root, build, options.timeout, options.verbose, is_live, device)
    if options.watch:
        Watch(suite, names, runner, _say).run()
    results: list[Result] = []
    width = max(map(len, names), default=0)
    with closing(_results(suite, selection.due(names), runner, options)) as found:
        for result in map(selection.checked, found):
            results.append(result)
            _say(*lines_of(result, width))
            recorder.enter(result)
    if options.all:
        _say(*extremes(results))
    if selection.runs:
        left = f"{counted(len(selection.runs) - len(selection.sample), 'page')} not run"
        _say(f"{left}: the records in {shown(published.folder)} hold, and {len(selection.sample)} of them were tried")
    if options.all and options.record:
        published.keep(suite.tree.names)
    if options.record:
        _count(suite, published).update()
    _say(summary(results))
    return FAILED if any(result.is_failed for result in results) else OK


def _say_exempt(names: Sequence[str], device: Device) -> list[str]:
    """Says which pages are left out on the device, and why; returns the others."""
    reasons = exempt_on(device)
    _say(*(f"{name}   exempt on {device.asked}: {reasons[name]}" for name in names if name in reasons))
    return [name for name in names if name not in reasons]


def _results(suite: Suite, names: Sequence[str], runner: Runner, options: Any) -> Generator[Result]:
    """Runs the pages, in processes of their own where the output of none is shown as it comes."""
    from pagetest.pool import Pool  # it needs psutil, and the checks that start no page do not

    jobs = options.jobs or (1 if options.names or options.device == CUDA else NUM_JOBS)
    if options.verbose or runner.live:
        yield from suite.run(names, runner)
    else:
        yield from Pool(suite, runner, jobs).run(names)


def _check(suite: Suite, names: Sequence[str], root: Path) -> int:
    published = Records(suite.tree.source.with_name(RECORDS))
    findings = [*suite.check(names), *_count(suite, published).faults()]
    _say(*_stale_records(suite, names, published, root))
    _say(*findings, f"{counted(len(names), 'page')} checked, {counted(len(findings), 'finding')}")
    return FAILED if findings else OK


def _count(suite: Suite, published: Records) -> Count:
    return Count(suite.tree.source.parents[1] / "README.md", suite.tree, published)


def _stale_records(suite: Suite, names: Sequence[str], published: Records, root: Path) -> Iterator[str]:
    """Names the committed records that hold no more, which is no fault: the website shows them grey."""
    graph, tree = ImportGraph(suite.code), suite.tree
    inputs = {device: common_inputs(root, device) for device in DEVICES}
    records = [one for one in published.read() if one["page"] in names and one["lang"] in tree.languages(one["page"])]
    stale = dict[str, list[str]]()
    for record in records:
        page, common = tree.page(record["page"], record["lang"]), inputs.get(record["device"], "")
        if change := changed_since(record, page, graph, common):
            stale.setdefault(change, []).append(record["page"])
    if stale:
        num_fresh = len(records) - sum(map(len, stale.values()))
        held = f"{num_fresh} of {counted(len(records), 'record')} hold"
        yield f"{shown(published.folder)}: {held}; `docs_test.py NAME --record` renews one, and `--record` all"
    yield from (f"  {change} changed since the run of {', '.join(dict.fromkeys(stale[change]))}" for change in stale)


def _translations(suite: Suite, names: Sequence[str]) -> int:
    findings = [finding for translation in suite.translations(names) for finding in translation.faults()]
    _say(*findings, f"{counted(len(names), 'page')}, {counted(len(findings), 'finding')}")
    return FAILED if findings else OK


def _acknowledge(suite: Suite, names: Sequence[str]) -> int:
    done = [translation.acknowledge() for translation in suite.translations(names)]
    findings = [finding for finding in done if finding]
    _say(*findings, f"{counted(len(done) - len(findings), 'translation')} acknowledged, {len(findings)} refused")
    return FAILED if findings else OK


def _list(suite: Suite, names: Mapping[str, Sequence[str]]) -> int:
    width = max(map(len, names))
    for name, reasons in names.items():
        languages = suite.tree.languages(name)
        command = suite.tree.page(name, languages[0]).command or "(no command)"
        count = len(suite.check_one(name))
        state = counted(count, "finding") if count else "checked"
        _say(f"{name:<{width}}   {' '.join(languages):<12} {state:<12} {command}", *_shortened(reasons))
    return OK


def _shortened(reasons: Sequence[str]) -> Iterator[str]:
    yield from (f"    {reason}" for reason in reasons[:NUM_REASONS])
    if len(reasons) > NUM_REASONS:
        yield f"    and {len(reasons) - NUM_REASONS} more"


def _say(*lines: object, to: TextIO | None = None) -> None:
    stream = to or sys.stdout
    stream.writelines(f"{line}\n" for line in lines)
    stream.flush()


@contextmanager
def _stoppable() -> Iterator[None]:
    """Lets SIGTERM end a run the way Ctrl-C does: with the page's processes killed.

    SIGINT too: a shell starts background commands with SIGINT ignored, and then Python leaves it so.
    """
    before = {number: signal.signal(number, signal.default_int_handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
