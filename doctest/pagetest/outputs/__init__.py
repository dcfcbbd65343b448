"""What a page shows as output, compared with what it printed."""
