"""`python -m structkv_bench` is `structkv-bench`."""

import sys

from structkv_bench.cli import main

sys.exit(main())
