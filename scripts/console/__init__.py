"""What commands share: their arguments, and how they print."""
