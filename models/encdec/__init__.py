"""Encoder-decoder families: their decoders attend to what an encoder makes of the prompt."""
