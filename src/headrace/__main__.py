"""`python -m headrace` is the `headrace` command."""

from __future__ import annotations

from headrace.cli.commands import main

if __name__ == "__main__":
    main()
