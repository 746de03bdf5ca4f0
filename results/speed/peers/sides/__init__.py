"""The sides that `peers.py` compares: a module each, whose `run` takes a job and returns its outcome.

Each runs in a process of its own, which imports nothing of the others: `python -m sides NAME JOB`.
"""
