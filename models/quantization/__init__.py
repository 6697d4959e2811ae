"""Weights of few bits: rounded as a model is loaded, or as a checkpoint brings them."""
