"""Runs a page in processes of its own and judges what happened."""
