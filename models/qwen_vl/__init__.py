"""Qwen-VL, the first of the line."""
