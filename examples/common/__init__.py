"""What the programs share: their options, their loop, and what they report."""
