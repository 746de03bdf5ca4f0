"""The command line; nothing else imports Typer or prints."""
