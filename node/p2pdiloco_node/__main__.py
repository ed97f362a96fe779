"""Where `p2pdiloco` begins. Everything is imported where Ctrl-C is answered: it takes a third of a second."""

from __future__ import annotations

import sys


def main() -> None:
    """Entry point of the console script."""
    try:
        from p2pdiloco_node.cli import run_command

        code = run_command(sys.argv[1:])
    except KeyboardInterrupt:
        code = 130  # exit_codes.INTERRUPTED, which may not be imported yet
    sys.exit(code)


if __name__ == "__main__":
    main()
