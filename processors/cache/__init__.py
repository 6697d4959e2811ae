"""Processed media by content, in memory and on disk."""
