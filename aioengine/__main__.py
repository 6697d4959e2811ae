"""The program `aioengine`, also as `python -m aioengine`."""

import os
import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line, or say what it lacks."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed: else the next file to be opened takes its place
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - for the whole process
    try:
        from aioengine.cli import run
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("aioengine"):
            raise
        message = (
            f'the command line needs {error.name.partition(".")[0]}: pip install "aioengine[cli]"'
        )
        sys.exit(f"aioengine: {message}")
    run()


if __name__ == "__main__":
    main()
