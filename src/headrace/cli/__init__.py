"""The `headrace` command. commands.py has the subcommands; a larger one has a file of its own."""
