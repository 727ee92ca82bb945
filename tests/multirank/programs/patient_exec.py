"""`hpcddp` whose `exec` waits for the report of another rank's failure as long as a busy machine may need."""

import sys

from hpcddp.cli.main import main
from hpcddp.runs import attempt

attempt._REPORT_S = 600.0
sys.exit(main())
