"""Runs a page in processes of its own and decides whether it passed."""
