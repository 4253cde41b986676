"""`python -m jaxops`."""

import sys

from jaxops._cli import main

if __name__ == "__main__":
    sys.exit(main())
