"""``torchrun … -m zoo.train MODEL …``: ``zoo train`` on several ranks."""

import sys

from zoo.cli import main

if __name__ == "__main__":
    sys.argv.insert(1, "train")
    main()
