"""Misfortunes with fixed seeds: kills, damaged files, wild command lines and hostile records; a module for each kind.

A trial is a function of its number, which seeds what it draws; it returns its fault, a line that says what went wrong,
or None.
`python -m tests.torture [SHARE] [--write]`, the long round, does SHARE of all trials, see `tests/torture/__main__.py`.
"""
