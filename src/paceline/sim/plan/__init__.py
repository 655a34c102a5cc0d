"""`paceline plan`: which devices, drafter and length, and what would change the answer."""
