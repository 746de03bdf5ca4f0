"""Speed: the engine against a plain PyTorch loop, measured, and what a joint step costs on a GPU, counted."""
