"""`python -m mpdist` is the command `mpdist`."""

import sys

from mpdist.cli import main

if __name__ == "__main__":
    sys.exit(main())
