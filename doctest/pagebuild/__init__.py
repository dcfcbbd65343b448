"""Turns the page model and the library's docstrings into what readers open: reference, websites, notebooks."""
