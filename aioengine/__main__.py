"""The program `aioengine`, also as `python -m aioengine`."""

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line, or say what it lacks."""
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
