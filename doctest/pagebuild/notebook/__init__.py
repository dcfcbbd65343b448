"""Notebooks: every page as cells that a reader can run, with the outputs of the page's recorded run."""
