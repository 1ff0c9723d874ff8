"""One step: `transaction` runs leaves, asks the participants, and commits or undoes all of it."""
