"""What `pipeline.config` reads a command line with: its words, its help, and the faults in it."""
