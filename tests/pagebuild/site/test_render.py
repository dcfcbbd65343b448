"""Building the website: packages, places in the author's files, missing programs. npm is played by a script."""

import json
import os
import re
from pathlib import Path

import pytest

from pagebuild import cli
from pagebuild.site import command, coverage
from pagebuild.site.front_matter import PageFacts, front_matter
from pagebuild.site.render.build_errors import BuildErrorLocator
from pagebuild.site.render.npm import MissingToolError, Npm, find_browser, quiet_environment
from pagebuild.site.render.site import Website

pytestmark = pytest.mark.slow

ZH = "i18n/zh-Hans/docusaurus-plugin-content-docs"
LINKS = "# T\n\nA [dead](../nowhere/x.md), an\n[anchor](lesson.md#nope) and [here](#gone).\n"
UNKNOWN = "docs/source/en/basics/lesson.md:4: autodoc knows no object pack.Nought"
SAYS = """\x1b[31m[ERROR]\x1b[0m Client bundle compiled with errors therefore further build is impossible.
\u2570\u2500\u25b6   \u00d7 Error: MDX compilation failed for file "/x/docs/basics/lesson.md"
  \u2502 Cause: {}
  \u2502 Details:
"""


@pytest.fixture
def places(docs) -> BuildErrorLocator:
    website = docs.root / "website"
    pages = {
        "docs/basics/lesson.md": ("docs/source/en/basics/lesson.md", "tutorial"),
        "docs/api/pack.md": ("src/pack/__init__.py", "api"),
        f"{ZH}/current/basics/lesson.md": ("docs/source/zh-Hans/basics/lesson.md", "tutorial"),
    }
    for name, (source, kind) in pages.items():
        docs.write(f"website/{name}", front_matter("basics/lesson", "en", PageFacts(source, None, kind)) + LINKS)
    return BuildErrorLocator(docs.root, website)


def found(places, log: str) -> list[str]:
    return [str(finding).removeprefix(f"{places.root}/") for finding in places.findings(log)]


@pytest.mark.parametrize(
    ("what", "place"),
    [
        (
            'Markdown image with URL `no.svg` in source file "docs/basics/lesson.md" (6:22) couldn\'t be resolved',
            "docs/source/en/basics/lesson.md:3: Markdown image with URL `no.svg` leads to nothing: correct it",
        ),
        (
            f'Markdown link with URL `x.md` in source file "{ZH}/current/basics/lesson.md" (9:1) could not',
            "docs/source/zh-Hans/basics/lesson.md:6: Markdown link with URL `x.md` leads to nothing: correct it",
        ),
        (
            f'{UNKNOWN}\n  \u2502 "message": "{UNKNOWN}"',
            UNKNOWN,
        ),
        (
            'Markdown link with URL `x.md` in source file "docs/api/pack.md" (9:1) could not',
            "website/docs/api/pack.md:9: Markdown link with URL `x.md` leads to nothing: correct it",
        ),
    ],
)
def test_what_the_compiler_says_is_told_at_the_authors_line(places, what, place) -> None:
    assert found(places, SAYS.replace("{}", what)) == [place]


def test_broken_links_are_told_where_the_author_wrote_them(places) -> None:
    log = """[cause]: Error: Docusaurus found broken links!
  Exhaustive list of all broken links found:
  - Broken link on source page path = /docs/basics/lesson/:
     -> linking to ../nowhere/x/ (resolved as: /docs/nowhere/x/)
  - Broken anchor on source page path = /zh-Hans/docs/basics/lesson/:
     -> linking to /zh-Hans/docs/lesson/#nope
     -> linking to #gone (resolved as: /zh-Hans/docs/basics/lesson/#gone)
  - Broken link on source page path = /:
     -> linking to /docs/away/
    """
    assert found(places, log) == [
        "docs/source/en/basics/lesson.md:3: the link `../nowhere/x/` leads to nothing: correct it",
        "docs/source/zh-Hans/basics/lesson.md:4: the anchor `#gone` leads to nothing: correct it",
        "docs/source/zh-Hans/basics/lesson.md:4: the anchor `/zh-Hans/docs/lesson/#nope` leads to nothing: correct it",
        "website:1: /: the link `/docs/away/` leads to nothing: correct it",
    ]


def test_a_released_version_has_the_addresses_without_a_name(docs, places) -> None:
    old = front_matter("basics/lesson", "en", PageFacts("docs/versioned/0.1.0/en/basics/lesson.md", None)) + LINKS
    docs.write("website/versioned_docs/version-0.1.0/basics/lesson.md", old)
    log = "Broken link on source page path = /docs/{}basics/lesson/:\n   -> linking to /docs/nowhere/x/\n"
    for prefix, source in (("", "versioned/0.1.0"), ("0.1.0/", "versioned/0.1.0"), ("next/", "source")):
        assert found(places, log.replace("{}", prefix))[0].startswith(f"docs/{source}/en/basics/lesson.md:3: ")


def test_a_warning_counts(places) -> None:
    log = (
        'Docusaurus found 2 unused Markdown directives in file "docs/basics/lesson.md"\n- :::note (5:1)\n- :x (7:3)\n'
        "Your content might render in an unexpected way."
    )
    assert [one.partition(": ")[0][-2:] for one in found(places, log)] == [":2", ":4"]
    assert not found(places, "[SUCCESS] Generated static files")


# ------------------------------------------------------------------------------------------ programs

NPM = """#!/bin/sh
echo "npm $*" >> calls
case "$1 $2" in
  "ci ") mkdir -p node_modules; test -z "$FAIL_CI" ;;
  "run build") printf '%s\\n' "$SAY"; exit "${FAIL_BUILD:-0}" ;;
  "test "*) echo "browser $CHROMIUM" >> calls ;;
esac
"""


def program(folder: Path, name: str, text: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)


@pytest.fixture
def site(docs) -> Website:
    website = docs.root / "docs" / "website"
    for name in ("package.json", "package-lock.json"):
        docs.write(f"docs/website/{name}", "{}")
    program(docs.root / "bin", "npm", NPM)
    program(docs.root / "bin", "node", '#!/bin/sh\necho "node $*" >> calls\n')
    return Website(docs.root, website, {"PATH": f"{docs.root / 'bin'}:/usr/bin:/bin"})


def calls(site: Website) -> list[str]:
    file = site.website / "calls"
    return file.read_text().splitlines() if file.exists() else []


def with_variables(site: Website, **more: str) -> Website:
    return Website(site.root, site.website, dict(site.environment) | more)


def test_packages_are_installed_when_the_lock_file_has_changed(site, docs, capsys) -> None:
    assert site.build()
    assert site.build()
    assert calls(site) == ["npm ci", "npm run build", "npm run build"]
    docs.write("docs/website/package-lock.json", '{"changed": true}')
    assert site.build()
    assert calls(site)[3:] == ["npm ci", "npm run build"]
    out = capsys.readouterr().out
    assert "site built: " in out
    assert "s of user CPU, largest process " in out


def test_a_failed_installation_is_tried_again(site) -> None:
    assert not with_variables(site, FAIL_CI="1").build()
    assert not Npm(site.website, site.environment).is_current
    assert calls(site) == ["npm ci"]


def test_a_build_that_fails_or_complains_is_no_build(site, places, capsys) -> None:
    assert not with_variables(site, FAIL_BUILD="1").build()
    assert "the site was not built: 0 findings, exit code 1" in capsys.readouterr().out
    complaint = "docs/source/en/basics/lesson.md:4: something is wrong"
    assert not with_variables(site, SAY=complaint).build()
    assert f"{places.root}/{complaint}\n" in capsys.readouterr().out


def test_without_npm_the_message_says_what_to_install(site) -> None:
    for verb in (Website.build, Website.test):
        with pytest.raises(MissingToolError, match=r"Found no (npm|node) on the path\. .*apt-get install nodejs npm"):
            verb(Website(site.root, site.website, {"PATH": ""}))


def test_nothing_phones_home() -> None:
    environment = quiet_environment({"A": "b", "NO_UPDATE_NOTIFIER": ""})
    assert environment["A"] == "b"
    assert environment["NO_UPDATE_NOTIFIER"] == "1"
    assert environment["npm_config_audit"] == environment["npm_config_fund"] == "false"


def test_the_browser_is_found_or_missed_loudly(site, docs, capsys) -> None:
    bare = with_variables(site, PATH=str(docs.root / "bin"))
    assert find_browser(bare.environment) is None
    assert bare.test()
    assert "THE BROWSER TESTS DID NOT RUN" in capsys.readouterr().out
    assert not with_variables(bare, CI="1").test()
    program(docs.root / "bin", "chromium", "#!/bin/sh\n")
    named = program(docs.root / "other", "mine", "#!/bin/sh\n") or str(docs.root / "other" / "mine")
    assert find_browser({"PATH": "", "CHROMIUM": named}) == named
    assert find_browser({"PATH": str(docs.root / "bin"), "CHROMIUM": "/nowhere"}) is None
    assert with_variables(bare, CI="1", PATH=f"{docs.root / 'bin'}:{os.defpath}").test()
    assert calls(site)[-3:] == ["npm test", f"browser {docs.root / 'bin' / 'chromium'}", "npm run test:checks"]


def test_the_browser_opens_every_page_or_those_that_a_change_touches(site, docs, capsys, monkeypatch) -> None:
    program(docs.root / "bin", "chromium", "#!/bin/sh\n")
    monkeypatch.setenv("PATH", site.environment["PATH"])
    monkeypatch.setattr(command, "write_inputs", lambda *_: True)
    assert cli.main(["site", "--test", "--full"], docs.root) == 0
    assert calls(site)[-3::2] == ["npm test", "npm run test:checks"]
    assert "one page of each template" not in capsys.readouterr().out
    assert cli.main(["site", "--test"], docs.root) == 0
    file = docs.root / "build/docs/touched.json"
    assert calls(site)[-2] == f"npm test -- --touched {file}"
    assert len(json.loads(file.read_text())["pages"]) == 8
    assert "one page of each template, and 8 more: always the same" in capsys.readouterr().out
    assert cli.main(["site", "--test", "--base", "nowhere"], docs.root) == 2
    assert "docs_build.py site: " in capsys.readouterr().err


def test_only_a_built_site_is_served_on_a_free_port(site, docs) -> None:
    with pytest.raises(MissingToolError, match="There is no site to serve"):
        site.serve(0)
    docs.write("build/site/index.html", "")
    assert site.serve(4321) == 0
    assert calls(site) == ["npm run serve -- --port 4321"]
    site.serve(0)
    assert int(calls(site)[-1].rpartition(" ")[2]) > 1024


# ------------------------------------------------------------------------------------------ the subcommand


def test_findings_leave_the_inputs_as_they_were(docs, capsys, monkeypatch) -> None:
    monkeypatch.setattr("pagebuild.site.website.landing_data", lambda *_: {})
    docs.write("src/pack/__init__.py", "class Thing: ...\n\n\ndef go(): ...\n\n\n__all__ = ['Thing', 'go']\n")
    lesson = docs.root / "docs/source/en/basics/lesson.md"
    website = docs.root / "website"
    assert command.write_inputs(docs.root, website), capsys.readouterr().out
    assert "4 pages offer no notebook, which `nox -s notebooks` would make" in capsys.readouterr().out
    before = {path: path.stat().st_mtime_ns for path in website.rglob("*")}
    lesson.write_text(lesson.read_text(encoding="utf-8").replace("../images/figure.svg", "../images/none.svg"))
    assert not command.write_inputs(docs.root, website)
    out = capsys.readouterr().out
    assert re.search(r"basics/lesson\.md:\d+: the link `\.\./images/none\.svg` leads to", out)
    assert "the website's inputs stay as they were" in out
    assert {path: path.stat().st_mtime_ns for path in website.rglob("*")} == before


def test_stale_sections_are_told_by_their_headings(docs, monkeypatch) -> None:
    tree = coverage.current_edition(docs.root).tree
    monkeypatch.setattr(coverage, "stale_sections", lambda _tree, name, language: [("More", f"{name} {language}", 14)])
    assert coverage.stale_headings(tree, docs.page()) == ()
    assert coverage.stale_headings(tree, docs.page(language="zh-Hans")) == ("basics/lesson zh-Hans",)


def test_the_front_matter_can_be_read_back(places) -> None:
    line = (places.website / "docs/basics/lesson.md").read_text(encoding="utf-8").split("\n")[1]
    assert json.loads(line)["page"]["source"] == "docs/source/en/basics/lesson.md"
