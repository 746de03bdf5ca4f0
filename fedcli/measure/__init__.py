"""What is measured of finished runs' models on images; `fedcli.runs.record` writes it."""
