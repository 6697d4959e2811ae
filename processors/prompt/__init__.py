"""Prompt updates: what a family's HF processor puts into the text, replaced in the tokens."""
