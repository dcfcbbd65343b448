"""What became of the pages: the report and the file of results."""
