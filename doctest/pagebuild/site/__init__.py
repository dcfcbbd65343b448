"""The website: from the page model to the files that Docusaurus reads in `docs/website`."""
