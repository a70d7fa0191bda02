"""`python -m ratel_cli` is `ratel`."""

import sys

from ratel_cli.cli.app import main

sys.exit(main())
