"""Where a decoding step's time goes, and which limit of the machine holds it up."""
