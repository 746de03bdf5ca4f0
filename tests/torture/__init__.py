"""Misfortunes with fixed seeds: kills, damaged files, wild command lines and hostile records; a module for each kind.

A trial is a function of its number, which seeds what it draws; it returns what went wrong, or an empty text.
`python -m tests.torture [SHARE] [--write]`, the long round, does SHARE of all trials, see `tests/torture/__main__.py`.
"""
