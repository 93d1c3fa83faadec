"""Which versions of the tables belong together: the ledger, and its copy in the lake for readers."""
