"""`python -m loco` is `loco`."""

from loco.cli import main

main()
