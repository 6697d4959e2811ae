"""The engine on the caller's event loop: requests from their prompt to their last token."""
