"""`inspect`: numbers about a data set, and what in it will be slow to read, or refused."""
