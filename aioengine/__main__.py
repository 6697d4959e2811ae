"""`python -m aioengine`."""

from aioengine.cli import run

if __name__ == "__main__":
    run()
