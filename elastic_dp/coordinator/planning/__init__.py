"""Who trains together next: members, their shares of the work, and whether a change pays."""
