"""``python tests/conformance`` is the same as ``python tests/conformance/run.py``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from conformance.run import main

sys.exit(main())
