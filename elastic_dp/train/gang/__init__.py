"""Workers of several processes: how these agree, and what each one reads."""
