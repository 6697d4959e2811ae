"""Media on their way to the encoder: fetched, identified, decoded and processed."""
