"""`python -m aioengine`."""

import sys

from aioengine.cli import main

if __name__ == "__main__":
    sys.exit(main())
