"""``python -m fp8graph`` is the ``fp8graph`` command."""

import sys

from fp8graph.cli import main

sys.exit(main())
