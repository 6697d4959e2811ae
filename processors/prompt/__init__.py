"""What a family's HF processor puts into the text, found in the tokens and replaced there."""
