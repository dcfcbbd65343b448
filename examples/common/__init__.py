"""What the example programs share: their options, their text and their loop."""
