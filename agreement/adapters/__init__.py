"""An adapter of each peer, which drives the peer's own classes in the peer's own environment.

It has `run(setup, problem)`, which returns what a run of the peer ends with: lists of tensors by the names that a row
compares. A row may name another function of it by `Setup.change`; that is called with the peer's server and the
problem before the first round, and changes one thing. What an adapter replaces in a peer's modules, it replaces by
`mock.patch`, which agreement/side.py takes back after each row.
"""
