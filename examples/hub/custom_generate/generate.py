"""What ``model.generate(..., custom_generate="FOLDER", trust_remote_code=True)`` runs."""

from paceline.integrations.transformers import generate_whole


def generate(model, *args, **kwargs):
    """Speculative decoding with Paceline: all of ``model.generate``'s arguments, and ``draft``.

    ``draft`` is "suffix" (the default), "ngram", the folder of a draft model, "eagle3:FOLDER" or
    any other drafter; see docs/guides/transformers.md.
    """
    return generate_whole(model, *args, **kwargs)
