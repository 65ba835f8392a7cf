"""Where the time of a decoding step goes, and which limit of the machine bounds it."""
