"""Everything that is asked of the source server. Only this package speaks to it."""
