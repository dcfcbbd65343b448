"""What can be checked of pages without running them."""
