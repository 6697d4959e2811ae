"""HF processors of our own, where transformers' need torchvision or code of a checkpoint."""
