"""Voxtral and Voxtral Realtime."""
