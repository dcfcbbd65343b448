"""Turns Markdown tutorials into scripts, runs each one under its own command, and decides whether it passed."""
