"""What `walmere check` says of the subscriber's side."""
