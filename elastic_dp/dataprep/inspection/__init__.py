"""`inspect`: a data set in numbers, and what in it will read badly."""
