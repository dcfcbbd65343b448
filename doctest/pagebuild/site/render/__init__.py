"""Building, testing and serving the website: what npm and Docusaurus do, and what they say of it."""
