"""An expense desk: one FastAPI worker with a database, uploads, two agents and work of its own."""
