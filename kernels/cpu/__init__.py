"""The place of native CPU kernels. None is built yet: CPUs run `aioengine.kernels.gather`."""
