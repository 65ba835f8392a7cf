"""Finding the drafter and the settings that decode fastest on this machine."""
