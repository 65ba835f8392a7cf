"""The lossless rules: from target laws and a drafted tree to the tokens that hold."""
