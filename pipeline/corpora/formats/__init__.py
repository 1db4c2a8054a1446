"""One module for each public format, and what several of them share."""
