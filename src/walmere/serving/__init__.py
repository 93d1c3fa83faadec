"""A small HTTP server: the page of `walmere dashboard`, and `/metrics`. It decides who may ask, and from where."""
