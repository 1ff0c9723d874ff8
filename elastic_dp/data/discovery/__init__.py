"""Which files of a URL are a data set: listed, skipped or refused by name, and indexed."""
