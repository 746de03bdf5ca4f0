"""From records to numbers, tables and pages."""
