"""The model of a page: what its Markdown says, and the tree that holds it."""
