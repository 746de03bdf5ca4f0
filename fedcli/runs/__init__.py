"""From options to a record, and resuming it."""
