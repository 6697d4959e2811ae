"""Layers that keep a state of each request: convolutions, gated delta nets, Mamba's mixers."""
