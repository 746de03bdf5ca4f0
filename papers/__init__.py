"""One self-contained file per paper, and the methods they compare with in `papers.baselines`."""
