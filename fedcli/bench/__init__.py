"""Speed, measured: the engine against a plain PyTorch loop, and rounds divided among workers."""
