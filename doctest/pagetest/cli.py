"""The command line: `python docs_test.py NAME ...`."""

import argparse
import signal
import sys
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, TextIO

from pagetest.checks.figures import Figures
from pagetest.finding import UsageError, display_path, with_count
from pagetest.graph.affected import AffectedPages
from pagetest.graph.changes import changed_files
from pagetest.graph.fingerprint import common_inputs
from pagetest.graph.imports import ImportGraph
from pagetest.model.tree import LANGUAGES, Tree, UnknownPageError
from pagetest.options import make_parser
from pagetest.results.readme import ReadmeCount
from pagetest.results.recorder import Recorder, run_facts
from pagetest.results.records import FOLDER_NAME, Records
from pagetest.results.report import report_lines, slowest_and_largest, summary
from pagetest.results.result import Result
from pagetest.results.run_finder import RunFinder, changed_since
from pagetest.results.selection import Selection, is_wanted, select_pages
from pagetest.run.device import CUDA, DEVICES, Device
from pagetest.run.exempt import why_exempt
from pagetest.run.live import is_terminal
from pagetest.run.runner import Runner
from pagetest.suite import Suite
from pagetest.warm.watch import PageWatcher

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130
NUM_REASONS = 3
NUM_JOBS = 2

_FILE_OPTIONS = ("translations", "ack", "figures", "tables")


def main(arguments: Sequence[str], root: Path) -> int:
    """Runs, checks or lists pages; returns 0 if all is well, 1 for a failed page, 2 for a wrong call, 130 stopped."""
    options = make_parser(root).parse_args(arguments)
    options.all |= options.record and not (options.names or options.affected)
    tree = Tree(options.source.resolve())
    languages = LANGUAGES if options.lang == "all" else (options.lang,)
    suite = Suite(tree, languages, root / "src", options.update_outputs)
    try:
        names = _select_names(options, tree, root)
        if not names:
            _print_lines(f"no page is affected by what differs from {options.affected}")
            return OK
        if options.check or options.list:
            return _list_pages(suite, names) if options.list else _check_pages(suite, tuple(names), root)
        if any(getattr(options, name) for name in _FILE_OPTIONS):
            return _write_files(suite, tuple(names), options)
        with _interrupt_on_signals():
            return _run_selected(suite, tuple(names), options, root)
    except UsageError as error:
        _print_lines(f"docs_test.py: {error}", to=sys.stderr)
        return USAGE
    except KeyboardInterrupt:
        _print_lines("interrupted; the page's processes are gone", to=sys.stderr)
        return INTERRUPTED


def _select_names(options: argparse.Namespace, tree: Tree, root: Path) -> Mapping[str, Sequence[str]]:
    """The pages that are meant, each with the reasons why."""
    if not tree.names:
        raise UnknownPageError(f"{tree.source} holds no page in {' or '.join(LANGUAGES)}: give the tree by --source")
    if sum(map(bool, (options.names, options.all, options.affected))) > 1:
        raise UsageError("give one of names, --all and --affected")
    if options.names:
        return {tree.resolve(name): () for name in options.names}
    if options.affected:
        return AffectedPages(tree, root, changed_files(root, options.affected)).reasons
    if not any(getattr(options, name) for name in ("all", "list", "check", *_FILE_OPTIONS)):
        raise UnknownPageError("give the name of a page, or --all; --list shows all pages")
    return dict.fromkeys(tree.names, ())


def _run_selected(suite: Suite, names: Sequence[str], options: Any, root: Path) -> int:
    device = Device(options.device)
    if device.fault:
        raise UsageError(device.fault)
    if not options.names:
        names = _leave_out_exempt(suite.tree, names, device)
    build = options.build.resolve()
    published, facts = Records(suite.tree.source.with_name(FOLDER_NAME)), run_facts(root, device.requested)
    kept = published if options.record else None
    recorder = Recorder(Records(build.with_name(FOLDER_NAME)), device, root, facts, kept)
    selection = Selection({}, frozenset())
    if options.all and is_wanted():
        fitting = RunFinder([published], suite.tree, ImportGraph(suite.code), device.expected, facts)
        selection = select_pages(names, suite.languages, fitting, facts["commit"])
    is_live = len(names) == 1 and is_terminal() and not (options.quiet or options.verbose)
    runner = Runner(root, build, options.timeout, options.verbose, is_live, device)
    if options.watch:
        PageWatcher(suite, names, runner, _print_lines).run()
    results: list[Result] = []
    width = max(map(len, names), default=0)
    with closing(_run_pages(suite, selection.names_to_run(names), runner, options)) as found:
        for result in map(selection.compare_with_record, found):
            results.append(result)
            _print_lines(*report_lines(result, width))
            recorder.add(result)
    if options.all:
        _print_lines(*slowest_and_largest(results))
    if selection.runs:
        left = f"{with_count(len(selection.runs) - len(selection.sample), 'page')} not run"
        folder, num_tried = display_path(published.folder), len(selection.sample)
        _print_lines(f"{left}: the records in {folder} hold, and {num_tried} of them were tried")
    if options.all and options.record:
        published.remove_others(suite.tree.names)
    if options.record:
        _readme_count(suite, published).update()
    _print_lines(summary(results))
    return FAILED if any(result.is_failed for result in results) else OK


def _leave_out_exempt(tree: Tree, names: Sequence[str], device: Device) -> list[str]:
    """Says which pages are left out on the device, and why; returns the others."""
    pages = {name: tree.page(name, tree.languages(name)[0]) for name in names}
    reasons = {name: why_exempt(page, device) for name, page in pages.items()}
    _print_lines(*(f"{name}   exempt on {device.requested}: {why}" for name, why in reasons.items() if why))
    return [name for name, why in reasons.items() if not why]


def _run_pages(suite: Suite, names: Sequence[str], runner: Runner, options: Any) -> Generator[Result]:
    """Runs the pages, in processes of their own where the output of none is shown as it comes."""
    from pagetest.pool import WorkerPool  # it needs psutil, and the checks that start no page do not

    jobs = options.jobs or (1 if options.names or options.device == CUDA else NUM_JOBS)
    if options.verbose or runner.live:
        yield from suite.run(names, runner)
    else:
        yield from WorkerPool(suite, runner, jobs).run(names)


def _check_pages(suite: Suite, names: Sequence[str], root: Path) -> int:
    published = Records(suite.tree.source.with_name(FOLDER_NAME))
    findings = [*suite.check(names), *_readme_count(suite, published).faults()]
    _print_lines(*_stale_record_lines(suite, names, published, root))
    _print_lines(*findings, f"{with_count(len(names), 'page')} checked, {with_count(len(findings), 'finding')}")
    return FAILED if findings else OK


def _readme_count(suite: Suite, published: Records) -> ReadmeCount:
    return ReadmeCount(suite.tree.source.parents[1] / "README.md", suite.tree, published)


def _stale_record_lines(suite: Suite, names: Sequence[str], published: Records, root: Path) -> Iterator[str]:
    """Names the committed records that no longer hold, which is no fault: the website shows them gray."""
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
        held = f"{num_fresh} of {with_count(len(records), 'record')} hold"
        yield f"{display_path(published.folder)}: {held}; `docs_test.py NAME --record` renews one, and `--record` all"
    yield from (f"  {change} changed since the run of {', '.join(dict.fromkeys(stale[change]))}" for change in stale)


def _write_files(suite: Suite, names: Sequence[str], options: Any) -> int:
    """What is done with files of pages, without a run."""
    if options.tables:
        return _write_tables(suite, names)
    if options.figures:
        return _write_figures(suite, names if options.names else (), options)
    return _acknowledge_translations(suite, names) if options.ack else _check_translations(suite, names)


def _check_translations(suite: Suite, names: Sequence[str]) -> int:
    findings = [finding for translation in suite.translations(names) for finding in translation.faults()]
    _print_lines(*findings, f"{with_count(len(names), 'page')}, {with_count(len(findings), 'finding')}")
    return FAILED if findings else OK


def _acknowledge_translations(suite: Suite, names: Sequence[str]) -> int:
    done = [translation.acknowledge() for translation in suite.translations(names)]
    findings = [finding for finding in done if finding]
    _print_lines(
        *findings, f"{with_count(len(done) - len(findings), 'translation')} acknowledged, {len(findings)} refused"
    )
    return FAILED if findings else OK


def _write_figures(suite: Suite, names: Sequence[str], options: Any) -> int:
    """Writes the figures of the pages' last run, and those of other languages; says what has changed."""
    records = Records(options.build.resolve().with_name(FOLDER_NAME))
    last = [record for record in records.read() if record["page"] in names and record["lang"] == LANGUAGES[0]]
    drawn = {
        name: records.figure(record, name)
        for record in last
        for block in record.get("blocks", ())
        for name in block["figures"]
    }
    changed = Figures(suite.tree).write(drawn)
    _print_lines(*map(display_path, changed), f"{with_count(len(changed), 'figure')} changed")
    return OK


def _write_tables(suite: Suite, names: Sequence[str]) -> int:
    """Writes the tables about plugins; says which pages have changed."""
    pages = [suite.tree.page(name, language) for name in names for language in suite.tree.languages(name)]
    changed = [page for page in pages if suite.plugin_tables.write(page)]
    _print_lines(*(display_path(page.path) for page in changed), f"{with_count(len(changed), 'page')} changed")
    return OK


def _list_pages(suite: Suite, names: Mapping[str, Sequence[str]]) -> int:
    width = max(map(len, names))
    for name, reasons in names.items():
        languages = suite.tree.languages(name)
        command = suite.tree.page(name, languages[0]).command or "(no command)"
        count = len(suite.check_one(name))
        state = with_count(count, "finding") if count else "checked"
        _print_lines(f"{name:<{width}}   {' '.join(languages):<12} {state:<12} {command}", *_first_reasons(reasons))
    return OK


def _first_reasons(reasons: Sequence[str]) -> Iterator[str]:
    yield from (f"    {reason}" for reason in reasons[:NUM_REASONS])
    if len(reasons) > NUM_REASONS:
        yield f"    and {len(reasons) - NUM_REASONS} more"


def _print_lines(*lines: object, to: TextIO | None = None) -> None:
    stream = to or sys.stdout
    stream.writelines(f"{line}\n" for line in lines)
    stream.flush()


@contextmanager
def _interrupt_on_signals() -> Iterator[None]:
    """Lets SIGTERM end a run the way Ctrl-C does: with the page's processes killed."""
    # SIGINT too: a shell starts background commands with SIGINT ignored, and then Python leaves it so.
    before = {number: signal.signal(number, signal.default_int_handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
