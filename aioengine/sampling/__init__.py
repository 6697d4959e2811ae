"""From logits to tokens: parameters as numbers, adjustments, grammars, draws, log probabilities."""
