"""``torchrun … -m zoo.train MODEL …``: ``zoo train`` on several ranks."""

import os
import sys

from zoo.cli import main

if __name__ == "__main__":
    sys.argv.insert(1, "train")
    code = 0
    try:
        main()
    except SystemExit as exit:
        code = exit.code if isinstance(exit.code, int) else 1 if exit.code else 0
    sys.stdout.flush()
    sys.stderr.flush()
    # what holds gloo's threads is taken down in no order at the end of Python, which at times aborts a run that is done
    os._exit(code)
