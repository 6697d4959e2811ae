"""Runtime of a model: transformers' module on a flattened batch, its loading and its checks."""
