"""Paged attention, matmuls with packed weights, norms and rotary embeddings for CPUs, in C++.

`arithmetic/` and `matmul/` are compiled once for each instruction set: attention, norms and rotary
embeddings; linear layers in floats (`linear.cpp`), in bfloat16 where the CPU multiplies it
(`bf16_gemm.cpp`, and of few bits `grouped_bf16.cpp`), and in bytes (`int8_gemm.cpp`). `program/`
cuts operators into parts for our team of threads. `ops/` and `layers/` are the operators on
PyTorch's stable ABI, those of one thing and those of whole layers and steps. `include/` is what
all know of each other. `library` finds and loads what was built; `backend`, `linear`, `norm` and
`rotary` call it. `setup.py` says how it is built.
"""
