"""Latent attention: pages hold what the keys and values of all heads are made of, once for all."""
