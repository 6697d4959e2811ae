"""OpenAI's Responses API: items in, items out, and a store of the host's that keeps them."""
