"""What a page shows as output, held against what it printed."""
