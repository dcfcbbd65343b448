"""Which project files a page's code reaches, and which pages a change reaches."""
