"""`python -m expertserve` is the command `expertserve`."""

import sys

from expertserve.cli import main

if __name__ == "__main__":
    sys.exit(main())
