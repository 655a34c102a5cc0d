"""Fetching a checkpoint from the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

from paceline.errors import ModelError

_WANTED = ["*.safetensors", "*.json", "*.jinja", "merges.txt", "tokenizer.model"]
_PICKLES = ["*.bin"]
# Sub-folders hold other formats of the same weights, and so does `consolidated`.
_UNWANTED = ["*/*", "consolidated*"]


def fetch(repo: str, revision: str | None, *, pickles: bool = False) -> tuple[Path, str | None]:
    """The folder of a hub repository in the local hub cache, downloaded as needed, and its commit.

    pickles: weights in `*.bin` files too.

    Honours HF_HUB_OFFLINE, HF_TOKEN and HF_HOME. Raises ModelError if it cannot be had.
    """
    import huggingface_hub
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    label = f"{repo}@{revision}" if revision else repo
    try:
        folder = huggingface_hub.snapshot_download(
            repo,
            revision=revision,
            allow_patterns=[*_WANTED, *_PICKLES] if pickles else _WANTED,
            ignore_patterns=_UNWANTED,
        )
    except GatedRepoError as error:
        raise ModelError(
            f"{label} is a gated model. Accept its terms on the hub's web page and log in: `hf auth login`."
        ) from error
    except RevisionNotFoundError as error:
        raise ModelError(
            f"{repo} has no revision {revision!r}. Give a branch, a tag or a full commit hash."
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelError(
            f"the hub has no model {repo!r}, or it is private. Check its spelling or log in: `hf auth login`."
        ) from error
    except Exception as error:  # hub versions let errors of different HTTP libraries through
        raise ModelError(
            f"cannot download {label}: {error}. Check the network (and HF_HUB_OFFLINE), or download the "
            "model elsewhere and give its folder."
        ) from error
    path = Path(folder)
    return path, path.name if path.parent.name == "snapshots" else revision
