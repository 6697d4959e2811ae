"""Paged attention, products with packed weights, norms and rotations for CPUs, in C++.

`vector.h` holds vectors of floats; attention in bfloat16 is `narrow.h`, with the tiles of AMX
(`tiles.h`) or vectors of pairs (`lanes.h`). The arithmetic of a piece of work is compiled once for
each instruction set: `attention.cpp`, `linear.cpp` (as floats), `pairs.cpp`
(as bfloat16, where the CPU has instructions for it), `norm.cpp`, `rotary.cpp`; `outputs.h` is what
becomes of a product's sums. The other headers are what the two sides know of each other, and
`ops.cpp` holds the operators on PyTorch's stable ABI. `library` finds and loads what was built of
them; `backend`, `linear`, `norm` and `rotary` call it. How it is built stands in `setup.py`.
"""
