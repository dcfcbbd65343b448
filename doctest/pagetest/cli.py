"""The command line: `python docs_test.py NAME ...`."""

import argparse
import signal
import sys
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from pagetest.checks.figures import Figures
from pagetest.finding import UsageError, display_path, with_count
from pagetest.graph.affected import AffectedPages
from pagetest.graph.changes import changed_files
from pagetest.graph.fingerprint import common_inputs
from pagetest.graph.imports import ImportGraph
from pagetest.limits import scaled
from pagetest.model.tree import LANGUAGES, Tree, UnknownPageError
from pagetest.options import make_parser
from pagetest.results.changed import ChangedPages
from pagetest.results.recorder import Recorder, run_facts
from pagetest.results.records import FOLDER_NAME, Records
from pagetest.results.report import closing_lines, report_lines, slowest_and_largest, summary
from pagetest.results.result import PageKey, Result
from pagetest.results.run_finder import changed_since
from pagetest.run.device import CUDA, DEVICES, Device
from pagetest.run.exempt import why_exempt
from pagetest.run.live import is_terminal
from pagetest.run.runner import Runner
from pagetest.suite import Suite
from pagetest.warm.watch import PageWatcher

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130
NUM_REASONS = 3
NUM_JOBS = 2
MAX_RETRIED = 12
"""More pages that fail are no accident."""
NAMED = "named"

_FILE_OPTIONS = ("translations", "ack", "figures", "tables")


def main(arguments: Sequence[str], root: Path) -> int:
    """Runs, checks or lists pages; returns 0 if all is well, 1 for a failed page, 2 for a wrong call, 130 stopped."""
    options = make_parser(root).parse_args(arguments)
    options.all |= options.record and not (options.names or options.affected or options.changed)
    tree = Tree(options.source.resolve())
    languages = LANGUAGES if options.lang == "all" else (options.lang,)
    suite = Suite(tree, languages, root / "src", options.update_outputs)
    try:
        names = _select_names(options, suite, root)
        if not names:
            _print_lines(*_nothing_to_do(options))
            return OK
        if options.check or options.list:
            return _list_pages(suite, names) if options.list else _check_pages(suite, tuple(names), root)
        if any(getattr(options, name) for name in _FILE_OPTIONS):
            return _write_files(suite, tuple(names), options)
        with _interrupt_on_signals():
            return _run_selected(suite, names, options, root)
    except UsageError as error:
        _print_lines(f"docs_test.py: {error}", to=sys.stderr)
        return USAGE
    except KeyboardInterrupt:
        _print_lines("interrupted; the page's processes are gone", to=sys.stderr)
        return INTERRUPTED


def _select_names(options: argparse.Namespace, suite: Suite, root: Path) -> Mapping[str, Sequence[str]]:
    """The pages that are meant, each with the reasons why."""
    tree = suite.tree
    if not tree.names:
        raise UnknownPageError(f"{tree.source} holds no page in {' or '.join(LANGUAGES)}: give the tree by --source")
    if sum(map(bool, (options.names or options.changed, options.all, options.affected))) > 1:
        raise UsageError("give one of names, --changed, --all and --affected: only names and --changed go together")
    named = [tree.resolve(name) for name in options.names]
    if options.changed:
        published = Records(tree.source.with_name(FOLDER_NAME))
        devices = [options.device] if options.device else DEVICES
        return dict.fromkeys(named, (NAMED,)) | ChangedPages(tree, suite.languages, published, devices).reasons
    if named:
        return dict.fromkeys(named, ())
    if options.affected:
        return AffectedPages(tree, root, changed_files(root, options.affected)).reasons
    if not any(getattr(options, name) for name in ("all", "list", "check", *_FILE_OPTIONS)):
        raise UnknownPageError("give the name of a page, or --all; --list shows all pages")
    return dict.fromkeys(tree.names, ())


def _nothing_to_do(options: argparse.Namespace) -> Iterator[str]:
    if options.affected:
        yield f"no page is affected by what differs from {options.affected}"
    else:
        yield from ("every page is as in its record", summary(()))


def _run_selected(suite: Suite, chosen: Mapping[str, Sequence[str]], options: Any, root: Path) -> int:
    device = Device(options.device)
    if device.fault:
        raise UsageError(device.fault)
    named = {suite.tree.resolve(name) for name in options.names}
    names, width = _leave_out_exempt(suite.tree, chosen, named, device), max(map(len, chosen))
    if options.changed:
        _print_lines(*(f"{name:<{width}}   {'; '.join(chosen[name])}" for name in names))
    build = options.build.resolve()
    published, facts = Records(suite.tree.source.with_name(FOLDER_NAME)), run_facts(root, device.requested)
    kept = published if options.record else None
    recorder = Recorder(Records(build.with_name(FOLDER_NAME)), device, root, facts, kept)
    is_live = len(names) == 1 and is_terminal() and not (options.quiet or options.verbose)
    runner = Runner(root, build, scaled(options.timeout), options.verbose, is_live, device)
    if options.watch:
        PageWatcher(suite, names, runner, _print_lines).run()
    is_one_by_one = device.requested == CUDA or (options.names and not options.changed)
    jobs = options.jobs or (1 if is_one_by_one else NUM_JOBS)
    results = _run_and_report(suite, names, runner, jobs, recorder)
    flaky: list[Result] = []
    if options.retry:
        again = _retry(suite, results, runner, recorder)
        flaky = [result for result in results if result.is_failed and not again.get(result.key, result).is_failed]
        results = [again.get(result.key, result) for result in results]
    if options.all:
        _print_lines(*slowest_and_largest(results))
    if options.all and options.record:
        published.remove_others(suite.tree.names)
    _print_lines(*closing_lines(results, flaky, device.requested))
    return FAILED if any(result.is_failed for result in results) else OK


def _leave_out_exempt(tree: Tree, names: Collection[str], named: Collection[str], device: Device) -> list[str]:
    """Says which pages that were not named are left out on the device, and why; returns the others."""
    pages = {name: tree.page(name, tree.languages(name)[0]) for name in names if name not in named}
    reasons = {name: why for name, page in pages.items() if (why := why_exempt(page, device))}
    _print_lines(*(f"{name}   exempt on {device.requested}: {why}" for name, why in reasons.items()))
    return [name for name in names if name not in reasons]


def _run_and_report(suite: Suite, names: Sequence[str], runner: Runner, jobs: int, recorder: Recorder) -> list[Result]:
    """Runs the pages, and reports and records each result as it comes."""
    results, width = list[Result](), max(map(len, names), default=0)
    with closing(_run_pages(suite, names, runner, jobs)) as found:
        for result in found:
            results.append(result)
            _print_lines(*report_lines(result, width))
            recorder.add(result)
    return results


def _retry(suite: Suite, results: Sequence[Result], runner: Runner, recorder: Recorder) -> dict[PageKey, Result]:
    """Runs the pages that failed in a run once more, one after the other, with twice the limit."""
    ran = {result.name for result in results if result.is_failed and (result.failure or result.log)}
    if len(ran) > MAX_RETRIED:
        _print_lines(f"{len(ran)} pages failed, and more than {MAX_RETRIED} are no accident: none is run once more")
        return {}
    slower, again = replace(runner, limit_seconds=2 * runner.limit_seconds), list[Result]()
    for name in dict.fromkeys(result.name for result in results if result.name in ran):
        failed = tuple(result.language for result in results if result.name == name and result.is_failed)
        _print_lines(f"once more, alone: {name}")
        again += _run_and_report(replace(suite, languages=failed), [name], slower, 1, recorder)
    return {result.key: result for result in again}


def _run_pages(suite: Suite, names: Sequence[str], runner: Runner, jobs: int) -> Generator[Result]:
    """Runs the pages, in processes of their own where the output of none is shown as it comes."""
    from pagetest.pool import WorkerPool  # it needs psutil, and the checks that start no page do not

    if runner.echo or runner.live:
        yield from suite.run(names, runner)
    else:
        yield from WorkerPool(suite, runner, jobs).run(names)


def _check_pages(suite: Suite, names: Sequence[str], root: Path) -> int:
    published = Records(suite.tree.source.with_name(FOLDER_NAME))
    findings = suite.check(names)
    _print_lines(*_stale_record_lines(suite, names, published, root))
    _print_lines(*findings, f"{with_count(len(names), 'page')} checked, {with_count(len(findings), 'finding')}")
    return FAILED if findings else OK


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
    """Writes the figures of the pages' last run; says what has changed."""
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
