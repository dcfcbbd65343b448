"""What can be said of pages without running them."""
