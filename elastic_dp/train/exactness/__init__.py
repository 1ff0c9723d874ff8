"""What decides whether two workers compute the same bits, and how that is compared."""
