"""One file per compared method."""
