"""What a caller asks and gets: requests, their text, grammars and completions."""
