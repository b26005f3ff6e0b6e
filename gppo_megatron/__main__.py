"""`python -m gppo_megatron` is the `gppo` command."""

import sys

from gppo_megatron.cli import main

if __name__ == "__main__":
    sys.exit(main())
