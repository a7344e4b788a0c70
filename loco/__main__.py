"""`python -m loco` is `loco`."""

from loco.cli import main

if __name__ == "__main__":  # and not in a process that multiprocessing starts
    main()
