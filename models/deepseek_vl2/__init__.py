"""DeepSeek-VL2."""
