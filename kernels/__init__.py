"""Paged attention: what runs on tensors and knows neither models nor requests.

`attention` defines the metadata of one step, what a backend must do, and the choice of a backend.
`reference` is the specification in plain PyTorch; `gather` is the fast path in plain PyTorch, for
CPU and CUDA tensors alike. Native code for CPUs belongs under `cpu/`, Triton kernels under
`triton/`; each registers a lazy factory with `register_backend` and is tested against `reference`.

Importing this package imports nothing else: torch loads with the submodules.
"""
