"""``paceline pull``: fetching named models, the one thing in this package that does."""

from paceline.pull.run import Pulled as Pulled
from paceline.pull.run import pull as pull
