"""Sampling from logits: parameters as numbers, adjustments, grammars, draws, log probabilities."""
