"""Paged attention for CPUs, in C++.

`vector.h` holds vectors of floats, `attention.cpp` the arithmetic of one piece of work (compiled
once for each instruction set), `attention.h` what the two sides know of each other, `ops.cpp` the
operators on PyTorch's stable ABI. `library` finds and loads what was built of them, `backend` is
the attention backend that calls it. How it is built stands in `setup.py`.
"""
