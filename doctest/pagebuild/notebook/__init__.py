"""Notebooks: every page as cells that a reader can run, executed before they are offered."""
