"""``python -m zoo``: the command line."""

from zoo.cli import main

if __name__ == "__main__":
    main()
