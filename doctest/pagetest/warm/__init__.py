"""Runs a page again at each save, in processes that have its packages loaded."""
