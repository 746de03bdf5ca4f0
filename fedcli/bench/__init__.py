"""Speed, measured: the engine against a plain PyTorch loop."""
