# pyright: reportArgumentType=false
import logging

import pytest

from colossal.errors import ConfigError
from colossal.logging import disable_existing_loggers, get_dist_logger
from colossal.testing import fake_world


def test_chosen_ranks_speak(capfd) -> None:
    for rank in (0, 1):
        with fake_world(2, rank=rank):
            logger = get_dist_logger("test.ranks")
            logger.info("everyone")
            logger.warning("the first", ranks=[0])
            logger.error("the second", ranks=[1])
            logger.debug("nobody: below the level")
    lines = [line.split(" ", 2)[2] for line in capfd.readouterr().err.splitlines()]
    name = "test.ranks"
    assert lines == [
        f"{name} INFO: [rank 0] everyone",
        f"{name} WARNING: [rank 0] the first",
        f"{name} INFO: [rank 1] everyone",
        f"{name} ERROR: [rank 1] the second",
    ]


def test_levels(capfd) -> None:
    logger = get_dist_logger("test.levels")
    logger.set_level("DEBUG")
    logger.debug("now heard")
    logger.set_level("ERROR")
    logger.warning("now dropped")
    assert capfd.readouterr().err.count("\n") == 1
    with pytest.raises(ConfigError, match="Found 'LOUD'"):
        logger.set_level("LOUD")


def test_each_rank_has_its_file(tmp_path, capfd) -> None:
    logger = get_dist_logger("test.file")
    with fake_world(4, rank=3):
        path = logger.log_to_file(tmp_path / "logs", mode="w", level="WARNING", suffix="run1")
        logger.info("not in the file")
        logger.warning("in the file")
    logger.close()
    logger.warning("after closing")
    assert path == tmp_path / "logs" / "rank_3_run1.log"
    assert [line.split("WARNING: ")[1] for line in path.read_text().splitlines()] == ["[rank 3] in the file"]
    assert capfd.readouterr().err.count("\n") == 3


@pytest.mark.parametrize(("options", "message"), [({"mode": "x"}, "Found 'x'"), ({"level": "ALL"}, "Found 'ALL'")])
def test_odd_files_are_refused(options, message, tmp_path) -> None:
    with pytest.raises(ConfigError, match=message):
        get_dist_logger("test.odd").log_to_file(tmp_path, **options)


def test_a_file_is_no_folder(tmp_path) -> None:
    (tmp_path / "taken").touch()
    with pytest.raises(ConfigError, match="writes into a folder"):
        get_dist_logger("test.odd").log_to_file(tmp_path / "taken")


def test_other_libraries_are_quietened() -> None:
    names = ["chatty", "chatty.part", "kept", "kept.part", "colossal.part", "keptless"]
    loggers = {name: logging.getLogger(name) for name in names}
    for logger in loggers.values():
        logger.setLevel(logging.INFO)
    disable_existing_loggers(include=names, exclude=["kept", "colossal"])
    quiet = {name for name, logger in loggers.items() if logger.level == logging.WARNING}
    assert quiet == {"chatty", "chatty.part", "keptless"}


def test_by_default_every_logger_but_ours_is_quietened() -> None:
    before = {name: logging.getLogger(name).level for name in logging.root.manager.loggerDict}
    chatty, ours = logging.getLogger("chatty"), logging.getLogger("colossal.part")
    chatty.setLevel(logging.INFO)
    ours.setLevel(logging.INFO)
    try:
        disable_existing_loggers()
        assert (chatty.level, ours.level) == (logging.WARNING, logging.INFO)
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)
