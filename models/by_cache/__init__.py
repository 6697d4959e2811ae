"""Decoders with attention of their own, run by transformers' cache interface over pages."""
