"""Turns Markdown tutorials into scripts, runs each one under its own command, and judges what happened."""
