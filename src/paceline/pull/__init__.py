"""``paceline pull``: downloads built-in models. Nothing else in the package downloads them."""

from paceline.pull.run import pull as pull
