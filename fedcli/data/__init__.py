"""Data sets: named images as uint8 tensors."""
