"""Plans run on the device: the model runner, what it needs of memory, and its trial at load."""
