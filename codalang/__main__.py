"""`python -m codalang` is the command `codalang`."""

import sys

from codalang.cli import main

sys.exit(main())
