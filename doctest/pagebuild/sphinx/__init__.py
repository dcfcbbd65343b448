"""Builds the same pages as a Sphinx site, with the API reference of every public module."""
