"""`python -m qprecon`: the command line."""

import sys

from qprecon.cli import main

sys.exit(main())
