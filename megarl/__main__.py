"""`python -m megarl ...` is the same as the `megarl` command."""

import sys

from megarl.cli import main

if __name__ == "__main__":
    sys.exit(main())
