"""Paged attention, matmuls with packed weights, norms and rotary embeddings for CPUs, in C++.

`arithmetic/` is compiled once for each instruction set: attention, linear layers (`linear.cpp` in
floats, `bf16_gemm.cpp` in bfloat16 where the CPU multiplies it), norms and rotary embeddings.
`ops/` is compiled once: the operators on PyTorch's stable ABI, which cut a step into pieces of work
for torch's threads. `include/` is what the two know of each other. `library` finds and loads what
was built; `backend`, `linear`, `norm` and `rotary` call it. `setup.py` says how it is built.
"""
