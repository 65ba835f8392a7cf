"""The lossless rules: from target distributions and a drafted tree to the tokens that hold."""
