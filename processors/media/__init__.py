"""Media as they come: fetched, recognised, bounded, decoded."""
