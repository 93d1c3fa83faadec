"""The ledger, which lists the versions of the tables that belong together, and its copy in the lake."""
