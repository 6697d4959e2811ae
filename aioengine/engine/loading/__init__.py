"""Loading of a model: its checkpoint, its device, and the libraries it needs."""
