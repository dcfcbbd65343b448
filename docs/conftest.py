"""Lets `pytest docs/source -n 2` run the pages."""

from pagetest.pytest_plugin import (
    pytest_addoption,
    pytest_collect_file,
    pytest_collection_modifyitems,
    pytest_configure,
    pytest_configure_node,
    pytest_report_teststatus,
    pytest_runtest_makereport,
    pytest_unconfigure,
)

__all__ = [
    "pytest_addoption",
    "pytest_collect_file",
    "pytest_collection_modifyitems",
    "pytest_configure",
    "pytest_configure_node",
    "pytest_report_teststatus",
    "pytest_runtest_makereport",
    "pytest_unconfigure",
]
