"""Molmo and Molmo 2."""
