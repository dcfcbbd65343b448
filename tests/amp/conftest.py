import logging
from collections.abc import Callable, Iterator

import pytest

from colossal.logging import get_dist_logger


@pytest.fixture
def logged(caplog) -> Iterator[Callable[[], list[str]]]:
    """What the library has logged so far."""
    logger = logging.getLogger(get_dist_logger().name)
    logger.addHandler(caplog.handler)
    yield lambda: [record.getMessage() for record in caplog.records]
    logger.removeHandler(caplog.handler)
