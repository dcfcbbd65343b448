"""Publishing: what changed is written, what is stale goes, what belongs to others stays."""

import pytest

from pagebuild.site.publish import publish

pytestmark = pytest.mark.slow

OWNED = ("docs", "sidebars.json", "static/downloads")


def tree(folder) -> dict[str, str]:
    return {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_writes_what_is_new(tmp_path) -> None:
    change = publish({"docs/a/b.md": b"1", "sidebars.json": b"2"}, tmp_path, OWNED)
    assert tree(tmp_path) == {"docs/a/b.md": "1", "sidebars.json": "2"}
    assert (change.written, change.removed, change.kept) == (("docs/a/b.md", "sidebars.json"), (), 0)


def test_leaves_alone_what_is_right_already(tmp_path) -> None:
    publish({"docs/a.md": b"1", "docs/b.md": b"2"}, tmp_path, OWNED)
    before = (tmp_path / "docs/a.md").stat()
    change = publish({"docs/a.md": b"1", "docs/b.md": b"3"}, tmp_path, OWNED)
    after = (tmp_path / "docs/a.md").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
    assert (change.written, change.kept) == (("docs/b.md",), 1)


def test_removes_what_nothing_generates_any_more(tmp_path) -> None:
    publish({"docs/old/a.md": b"1", "docs/b.md": b"2", "sidebars.json": b"3"}, tmp_path, OWNED)
    (tmp_path / "docs/link.md").symlink_to(tmp_path / "nowhere")
    change = publish({"docs/b.md": b"2"}, tmp_path, OWNED)
    assert tree(tmp_path) == {"docs/b.md": "2"}
    assert change.removed == ("docs/link.md", "docs/old/a.md", "sidebars.json")
    assert not (tmp_path / "docs/old").exists()


def test_touches_nothing_of_others(tmp_path) -> None:
    (tmp_path / "static").mkdir()
    for name in ("package.json", "static/logo.svg", "docs.config.js"):
        (tmp_path / name).write_text("theirs")
    publish({"docs/a.md": b"1", "static/downloads/a.py": b"2"}, tmp_path, OWNED)
    publish({}, tmp_path, OWNED)
    assert tree(tmp_path) == dict.fromkeys(("package.json", "static/logo.svg", "docs.config.js"), "theirs")
