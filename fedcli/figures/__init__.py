"""From records and checkpoints to pictures."""
