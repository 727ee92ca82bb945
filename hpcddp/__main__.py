"""`python -m hpcddp`: the same as the `hpcddp` command."""

import sys

from hpcddp.cli.main import main

sys.exit(main())
