"""The endpoints of the HTTP API: what clients ask, and the answers in the shapes they expect."""
