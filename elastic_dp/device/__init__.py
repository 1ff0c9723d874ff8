"""All that differs by device."""
