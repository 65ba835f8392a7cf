"""Paceline inside other libraries: each module belongs to the library that it is named after."""
