"""What polyrank computes: a library. Importing it does nothing, and it never starts a cluster."""
